"""For each check of the kit platforms that break exactly that: what the check is worth."""

from __future__ import annotations

import contextlib
import functools
import os
import types

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


class CountsInWords(SimX):
    def ray_noset_envvars(self):
        return "RAY_EXPERIMENTAL_NOSET_SIMX_VISIBLE_DEVICES"


class AnswersForAll(SimX):
    def supports(self, feature):
        return self.features.get(feature, (True, "why not"))


class AlwaysAvailable(SimX):
    def is_available(self):
        return True


class OneIndex(SimX):
    def device_index(self, reported_id):
        return 0


class SortsTheMask(SimX):
    def adopt_mask(self, environ=None):
        ids = super().adopt_mask(environ)
        return None if ids is None else sorted(ids)


class UuidIsTheIndex(SimX):
    def get_device_uuid(self, device_id):
        return f"SIMX-{device_id}"


class UuidChanges(SimX):
    def get_device_uuid(self, device_id):
        return f"{super().get_device_uuid(device_id)}-{id(object())}-{os.urandom(4).hex()}"


class AsksForGpus(SimX):
    def ray_resource_options(self, num_gpus):
        return {"num_gpus": num_gpus}


class NoProfiler(SimX):
    def profiler_start(self):
        raise RuntimeError("the profiler is not installed")


class StaysWhereItIs(SimX):
    def set_device(self, device_index):
        if not 0 <= device_index < self.device_count():
            raise ValueError(device_index)


class ForgetsThePeak(_Module):
    @staticmethod
    def changes(module):
        return {"max_memory_allocated": lambda device=None: module.memory_allocated(device)}


class KeepsThePeak(_Module):
    @staticmethod
    def changes(module):
        return {"reset_peak_memory_stats": lambda device=None: None}


class NeverShrinks(_Module):
    @staticmethod
    def changes(module):
        return {"memory_allocated": lambda device=None: module.max_memory_allocated(device)}


class SwapsFreeAndTotal(_Module):
    @staticmethod
    def changes(module):
        return {"mem_get_info": lambda device=None: module.mem_get_info(device)[::-1]}


class TellsTooLittleMemory(_Module):
    @staticmethod
    def changes(module):
        return {"get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=1 << 20)}


class SeedsTheHostToo(SimX):
    def manual_seed(self, seed):
        torch.manual_seed(seed)


class SeedsNobody(SimX):
    def manual_seed_all(self, seed):
        pass


class OldState(_Module):
    @staticmethod
    def changes(module):
        state = module.get_rng_state()
        return {"get_rng_state": lambda device=None: state}


class OneStream(SimX):
    def current_stream(self):
        return self.device_module.default_stream()


class WaitsForOneStream(SimX):
    def synchronize(self, device_index=None):
        self.current_stream().synchronize()


class SlowCurrentDevice(SimX):
    def current_device(self):
        for _ in range(400):
            torch.get_num_threads()
        return super().current_device()


class NoHostHalf(SimX):
    def process_group_backend(self):
        return "simxccl"


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
    "names": (Names,),
    "contract": (Contract, CountsInWords),
    "features": (Features, AnswersForAll),
    "probe": (ProbeFollowsTheMask, ProbeLoadsTheSdk),
    "visibility": (Visibility, AlwaysAvailable, OneIndex),
    "mask-errors": (MaskErrors, SortsTheMask),
    "uuid": (Uuid, UuidIsTheIndex, UuidChanges),
    "ray-resource": (RayResource, AsksForGpus),
    "profiling": (Profiling, NoProfiler),
    "device-selection": (DeviceSelection, StaysWhereItIs),
    "errors": (Errors,),
    "memory-figures": (MemoryFigures, ForgetsThePeak, KeepsThePeak, NeverShrinks, SwapsFreeAndTotal),
    "out-of-memory": (OutOfMemory, TellsTooLittleMemory),
    "rng-seed": (RngSeed, SeedsTheHostToo),
    "rng-seed-all": (RngSeedAll, SeedsNobody),
    "rng-state": (RngState, OldState),
    "copies": (Copies,),
    "dtypes": (Dtypes,),
    "checkpoint": (Checkpoint,),
    "call-cost": (CallCost, SlowCurrentDevice),
    "pinned-copy": (PinnedCopy,),
    "streams": (Streams, OneStream),
    "synchronize": (Synchronize, WaitsForOneStream),
    "backend-string": (BackendString, NoHostHalf),
    "collectives": (Collectives,),
    "fsdp2-step": (Fsdp2Step,),
    "native-rollout": (NativeRollout,),
}
"""The check that each of them, and nothing else, fails."""
