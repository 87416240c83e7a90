"""The contract of a platform: what verl's call sites ask of a chip, with a default for all that torch already knows.

A vendor file states only its differences. Nothing here imports verl or ray, so a machine with nothing but torch can
run a platform and prove it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

from verl_fl._errors import explain
from verl_fl.platform import evidence, flagcx, masks

logger = logging.getLogger("verl_fl.platform")

FEATURES = ("bf16", "flash_attention_2", "fp16", "fsdp1", "ipc", "pinned_memory", "streams")
"""What :meth:`Platform.supports` answers for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What one platform's detection says about this machine."""

    found: bool
    """Whether this is that vendor's machine, whatever the process may see of it."""

    reason: str
    """The evidence, in a sentence a user can check."""

    unusable: bool = False
    """Its hardware is here, but this Python environment can't use it; ``reason`` says what is missing."""


class Platform:
    """One chip as verl sees it.

    The sixteen methods of verl's call sites, then streams, then what Ray and the rollout need. All take and return
    plain values; none of them may be called by :meth:`probe`, which must be cheap and safe on any machine.
    """

    name: ClassVar[str]
    """The name that ``VERL_PLATFORM`` and ``+fl=`` select."""

    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names for the same platform, verl's own among them."""

    verl_name: ClassVar[str] = ""
    """Stock verl's registry name for the same chip; empty: verl has none."""

    device_name: ClassVar[str]
    """torch's device type, such as ``cuda``."""

    vendor_name: ClassVar[str]
    """Who made the chip, such as ``nvidia``."""

    sdk: ClassVar[str] = ""
    """The package that adds ``torch.<device_name>``, imported when the device is first used; empty: torch has it."""

    collective: ClassVar[str]
    """torch.distributed's backend for the device's tensors, such as ``nccl``."""

    flagcx: ClassVar[str] = ""
    """FlagCX's name for the chip; empty: FlagCX does not serve it."""

    visible_devices: ClassVar[str]
    """The variable that masks devices for a new process."""

    mask_aliases: ClassVar[tuple[str, ...]] = ()
    """Masks of other vendors that a launcher may have set in its place; see :meth:`adopt_mask`."""

    mask_read: ClassVar[str] = "first use"
    """When the runtime reads its mask, once: at ``first use`` of a device, or at ``import`` of the SDK."""

    mask_uuids: ClassVar[bool] = False
    """Whether a mask may name devices by UUID."""

    ray_resource: ClassVar[str]
    """The Ray resource that counts the devices: ``GPU`` where Ray does so itself, else a custom one."""

    smi_tool: ClassVar[str] = ""
    """The vendor's management tool. Never evidence: other vendors ship tools of the same name."""

    pci_vendor: ClassVar[str] = ""
    """PCI vendor id, such as ``0x10de``."""

    device_nodes: ClassVar[str] = ""
    """The kernel driver's device files, such as ``/dev/nvidia[0-9]*``."""

    ipc: ClassVar[bool] = False
    """Whether two processes can share device memory by handle."""

    features: ClassVar[Mapping[str, tuple[bool, str]]] = {}
    """What :meth:`supports` answers where that differs from the defaults: ``{feature: (works, why)}``."""

    @classmethod
    def probe(cls) -> Probe:
        """Say whether this machine is this vendor's. Loads no SDK; independent of any visibility mask.

        By default the SDK's package is the evidence: it is installed on a vendor's machines, head nodes without a
        device included.
        """
        hardware = cls.hardware()
        if evidence.package(cls.sdk):
            return Probe(found=True, reason=f"package {cls.sdk} is installed" + (f"; {hardware}" if hardware else ""))
        absent = f"package {cls.sdk} is not installed"
        return Probe(found=False, reason=f"{hardware}, but {absent}" if hardware else absent, unusable=bool(hardware))

    @classmethod
    def hardware(cls) -> str:
        """What the kernel and the PCI bus show of this vendor's chips, in words; empty: nothing."""
        nodes, cards = evidence.device_nodes(cls.device_nodes), evidence.pci_devices(cls.pci_vendor)
        seen = [f"{len(nodes)} device files like {nodes[0]}"] if nodes else []
        return " and ".join(seen + ([f"{cards} cards on the PCI bus ({cls.pci_vendor})"] if cards else []))

    @functools.cached_property
    def device_module(self) -> Any:
        """torch's namespace for the device, such as ``torch.cuda``, or an object that behaves like it.

        The first use settles the mask (:meth:`adopt_mask`) and imports the SDK.

        Raises:
            RuntimeError: the SDK can't be imported, or torch does not know the device.
        """
        self.adopt_mask()
        try:
            if self.sdk:
                importlib.import_module(self.sdk)
            import torch

            return self.on_load(getattr(torch, self.device_name))
        except (Exception, SystemExit) as error:  # whatever a vendor's SDK raises
            raise RuntimeError(
                explain(
                    f"torch can't use {self.device_name!r} devices here: {type(error).__name__}: {error}",
                    asked=f"platform {self.name}",
                    found=self.probe().reason,
                    fix=f"install the {self.sdk or 'torch'} that fits this machine's {self.vendor_name} driver",
                )
            ) from error

    def on_load(self, module: Any) -> Any:
        """Mend what the vendor's module lacks, once, and return it."""
        return module

    # --- device -------------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        """Whether this process can use at least one device now; an SDK that does not load is a warning and a no."""
        try:
            module = self.device_module
        except RuntimeError as error:
            logger.warning("platform: %s", error)
            return False
        return bool(module.is_available())

    def current_device(self) -> Any:
        """The selected device as ``Tensor.to`` accepts it: an index, or a ``torch.device`` where there are none."""
        return self.device_module.current_device()

    def device_count(self) -> int:
        """Devices this process may use."""
        return int(self.device_module.device_count())

    def set_device(self, device_index: int) -> None:
        """Select the device at ``device_index`` of the visible ones."""
        self.device_module.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        """Block until all work queued on the device is done."""
        if device_index is None:
            self.device_module.synchronize()
        else:
            self.device_module.synchronize(device_index)

    # --- random numbers -----------------------------------------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        self.device_module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed every device's generator."""
        self.device_module.manual_seed_all(seed)

    # --- memory -------------------------------------------------------------------------------------------------

    def set_allocator_settings(self, settings: str) -> None:
        """Configure the caching allocator; a device without one ignores it."""
        apply = getattr(getattr(self.device_module, "memory", None), "_set_allocator_settings", None)
        if apply is not None:
            apply(settings)

    def empty_cache(self) -> None:
        """Give unused cached memory back."""
        self.device_module.empty_cache()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """``(major, minor)`` compute capability, or ``(None, None)`` where the idea does not apply."""
        query = getattr(self.device_module, "get_device_capability", None)
        return (None, None) if query is None else query(device_index)

    # --- communication ------------------------------------------------------------------------------------------

    def communication_backend_name(self) -> str:
        """torch.distributed's backend for this device's tensors; ``flagcx`` where ``USE_FLAGCX`` asks for it.

        Raises:
            RuntimeError: FlagCX was asked for and can't be had.
        """
        if not flagcx.requested():
            return self.collective
        flagcx.require(self.name, self.flagcx)
        return "flagcx"

    def visible_devices_envvar(self) -> str:
        """The variable that masks devices for a new process."""
        return self.visible_devices

    def adopt_mask(self, environ: MutableMapping[str, str] | None = None) -> list[str] | None:
        """Make ``environ`` (by default this process's) hold this platform's own mask and no stand-in for it.

        Returns its ids, ``[]`` where it hides every device, or None where there is no mask.

        Raises:
            ValueError: the mask is not a list of ids.
            RuntimeError: the runtime has read its mask already, and would not see the change.
        """
        target = os.environ if environ is None else environ
        late = self.mask_read == "import" and self.sdk in sys.modules
        if masks.adopt(target, self.visible_devices, self.mask_aliases, sdk_loaded=late) is None:
            return None
        return masks.parse(target[self.visible_devices], variable=self.visible_devices, uuids=self.mask_uuids)

    def device_id(self, device_index: int) -> str:
        """What the mask calls the device at ``device_index`` of the visible ones."""
        ids = [part.strip() for part in os.environ.get(self.visible_devices, "").split(",") if part.strip()]
        return ids[device_index] if ids else str(device_index)

    def device_index(self, reported_id: str) -> int:
        """The index in this process of a device that Ray reported: its position in the mask.

        Raises:
            ValueError: the mask hides that device.
        """
        ids = self.adopt_mask()
        if ids is None:
            return int(reported_id)
        if str(reported_id) not in ids:
            raise ValueError(
                explain(
                    f"device {reported_id} was assigned to this process, and its mask hides it",
                    asked=f"device {reported_id} of resource {self.ray_resource}",
                    found=f"{self.visible_devices}={','.join(ids)}",
                    legal=f"one of {', '.join(ids) or 'no ids at all'}",
                    fix=f"start Ray on this node without {self.visible_devices}, or with all its devices in it",
                )
            )
        return ids.index(str(reported_id))

    def process_group_backend(self) -> str:
        """The string for ``init_process_group``: a CPU half, and the device's own where it is another device."""
        own = self.communication_backend_name()
        return f"cpu:{own}" if self.device_name == "cpu" else f"cpu:gloo,{self.device_name}:{own}"

    # --- profiling ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Name the enclosed block in the device's profiler; without one, do nothing."""
        yield

    def profiler_start(self) -> None:
        """Start the device's profiler; without one, do nothing."""

    def profiler_stop(self) -> None:
        """Stop the device's profiler; without one, do nothing."""

    def cudart(self) -> Any:
        """The CUDA runtime API, or None."""
        return None

    # --- streams: weight sync overlaps its copies with them -----------------------------------------------------

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """A context in which work goes to ``stream``."""
        return self.device_module.stream(stream)

    def current_stream(self) -> Any:
        """The stream that work goes to now."""
        return self.device_module.current_stream()

    def new_stream(self) -> Any:
        """A new stream on the current device."""
        return self.device_module.Stream()

    def new_event(self) -> Any:
        """A new event on the current device."""
        return self.device_module.Event()

    # --- Ray and the rollout ------------------------------------------------------------------------------------

    def ray_resource_name(self) -> str:
        """The Ray resource that counts this platform's devices."""
        return self.ray_resource

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        """Ray actor options that ask for ``num_gpus`` devices of this platform."""
        name = self.ray_resource_name()
        return {"num_gpus": num_gpus} if name == "GPU" else {"resources": {name: num_gpus}}

    def ray_noset_envvars(self) -> list[str]:
        """Variables that keep Ray from setting this platform's device mask."""
        return [f"RAY_EXPERIMENTAL_NOSET_{self.visible_devices}"]

    def is_ipc_supported(self) -> bool:
        """Whether two processes can share device memory by handle."""
        return self.ipc

    def apply_model_patches(self, model_type: str) -> None:
        """Replace operators of a model that the device lacks; by default none."""
        return None

    def get_collective_module(self) -> Any:
        """A Python binding of the collective library, such as ``cupy.cuda.nccl``, or None."""
        return None

    def rollout_env_vars(self) -> dict[str, str]:
        """Environment that a rollout server of this platform needs."""
        return {}

    def get_device_uuid(self, device_id: int) -> str:
        """A name for the device that is the same in every process of the node."""
        return f"{self.ray_resource_name()}-{self.device_id(device_id)}"

    # --- capabilities -------------------------------------------------------------------------------------------

    def supports(self, feature: str) -> tuple[bool, str]:
        """Whether one of :data:`FEATURES` works here, and why. ``streams``: work can run beside its caller.

        Raises:
            ValueError: the feature is not one that platforms answer for.
        """
        if feature in self.features:
            return self.features[feature]
        if feature == "ipc":
            works = self.is_ipc_supported()
            return works, f"handles of device memory can {'' if works else 'not, as far as is known, '}be shared"
        if feature == "flash_attention_2":
            works = evidence.package("flash_attn")
            return works, f"package flash_attn is {'' if works else 'not '}installed"
        if feature in FEATURES:
            return True, "usual for an accelerator"
        raise ValueError(f"unknown feature {feature!r}; legal: {', '.join(FEATURES)}")
