"""For each check of the kit a platform that breaks exactly that: what the check is worth."""

from __future__ import annotations

import contextlib
import functools
import os

import torch

from verl_fl.platform.base import Probe
from verl_fl.testing.simulated.vendors import SimX


class _Changed:
    """A device module with some functions replaced."""

    def __init__(self, module, **changes):
        self.__dict__.update(module=module, changes=changes)

    def __getattr__(self, name):
        return self.changes[name] if name in self.changes else getattr(self.module, name)


class _Module(SimX):
    """Answers with another device module."""

    @functools.cached_property
    def device_module(self):
        module = SimX.device_module.func(self)
        return _Changed(module, **self.changes(module))


class _Broken(SimX):
    """Runs on a chip with a fault."""

    fault = ""

    @functools.cached_property
    def device_module(self):
        module = SimX.device_module.func(self)
        module.set_fault(self.fault)
        return module


class Names(SimX):
    vendor_name = "Acme Inc."


class Contract(SimX):
    def get_device_capability(self, device_index=0):
        return "1.0"


class Features(SimX):
    def supports(self, feature):
        return (True, "") if feature == "ipc" else super().supports(feature)


class ProbeFollowsTheMask(SimX):
    @classmethod
    def probe(cls):
        return Probe(found=os.environ.get(cls.visible_devices) != "", reason="looked at the mask")


class ProbeLoadsTheSdk(SimX):
    @classmethod
    def probe(cls):
        import verl_fl.testing.simulated.torch_simx  # noqa: F401

        return Probe(found=True, reason="it can be imported")


class Visibility(SimX):
    visible_devices = "OTHER_VISIBLE_DEVICES"


class MaskErrors(SimX):
    def adopt_mask(self, environ=None):
        text = (os.environ if environ is None else environ).get(self.visible_devices)
        return None if text is None else [part for part in text.split(",") if part]


class Uuid(SimX):
    def get_device_uuid(self, device_id):
        return "SIMX"


class RayResource(SimX):
    ray_resource = "CPU"


class Profiling(SimX):
    @contextlib.contextmanager
    def nvtx_range(self, msg):
        raise RuntimeError("NVTX is not installed")
        yield


class DeviceSelection(SimX):
    def current_device(self):
        return 0


class Errors(SimX):
    def set_device(self, device_index):
        super().set_device(device_index % self.device_count())


class MemoryFigures(_Module):
    @staticmethod
    def changes(module):
        return {"memory_allocated": lambda device=None: 0}


class OutOfMemory(_Broken):
    fault = "memory"


class RngSeed(SimX):
    def manual_seed(self, seed):
        pass


class RngSeedAll(SimX):
    def manual_seed_all(self, seed):
        self.device_module.manual_seed(seed)


class RngState(_Module):
    @staticmethod
    def changes(module):
        return {"set_rng_state": lambda state, device=None: None}


class Copies(_Broken):
    fault = "copies"


class _Deaf:
    """An event that nobody can wait for."""

    def __init__(self, event):
        self._event = event

    def synchronize(self):
        pass

    def __getattr__(self, name):
        return getattr(self._event, name)


class PinnedCopy(SimX):
    def new_event(self):
        return _Deaf(super().new_event())


class Streams(SimX):
    def stream(self, stream):
        return contextlib.nullcontext()


class Synchronize(SimX):
    def synchronize(self, device_index=None):
        pass


class Dtypes(_Broken):
    fault = "bf16"


class _State:
    def __init__(self, tensor):
        self.tensor = tensor


class Checkpoint(_Module):
    @staticmethod
    def changes(module):
        return {
            "get_rng_state": lambda device=None: _State(module.get_rng_state()),
            "set_rng_state": lambda state, device=None: module.set_rng_state(state.tensor),
        }


class CallCost(SimX):
    def device_count(self):
        for _ in range(400):
            torch.get_num_threads()
        return super().device_count()


class BackendString(SimX):
    def process_group_backend(self):
        return "simx:simxccl"


class Collectives(_Broken):
    fault = "all_reduce"


class Fsdp2Step(_Broken):
    fault = "aten::native_layer_norm_backward"


class NativeRollout(_Broken):
    fault = "aten::argmax"


MUTANTS = {
    "names": Names,
    "contract": Contract,
    "features": Features,
    "probe": ProbeFollowsTheMask,
    "visibility": Visibility,
    "mask-errors": MaskErrors,
    "uuid": Uuid,
    "ray-resource": RayResource,
    "profiling": Profiling,
    "device-selection": DeviceSelection,
    "errors": Errors,
    "memory-figures": MemoryFigures,
    "out-of-memory": OutOfMemory,
    "rng-seed": RngSeed,
    "rng-seed-all": RngSeedAll,
    "rng-state": RngState,
    "copies": Copies,
    "pinned-copy": PinnedCopy,
    "streams": Streams,
    "synchronize": Synchronize,
    "dtypes": Dtypes,
    "checkpoint": Checkpoint,
    "call-cost": CallCost,
    "backend-string": BackendString,
    "collectives": Collectives,
    "fsdp2-step": Fsdp2Step,
    "native-rollout": NativeRollout,
}
"""The check that each of them, and nothing else, fails."""
