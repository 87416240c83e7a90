"""The contract of a platform: what verl's call sites ask of a chip, with a default for all that torch already knows.

A vendor file states only its differences. Nothing here imports verl or ray, so a machine with nothing but torch can
run a platform and prove it.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What one platform's detection says about this machine."""

    found: bool
    """Whether this is that vendor's machine, whatever the process may see of it."""

    reason: str
    """The evidence, in a sentence a user can check."""


class Platform(ABC):
    """One chip as verl sees it.

    The sixteen methods of verl's call sites, then streams, then what Ray and the rollout need. All take and return
    plain values; none of them may be called by :meth:`probe`, which must be cheap and safe on any machine.
    """

    name: ClassVar[str]
    """The name that ``VERL_PLATFORM`` and ``+fl=`` select."""

    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names for the same platform, verl's own among them."""

    device_name: ClassVar[str]
    """torch's device type, such as ``cuda``."""

    vendor_name: ClassVar[str]
    """Who made the chip, such as ``nvidia``."""

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Say whether this machine is this vendor's. Loads no SDK; independent of any visibility mask."""

    @property
    @abstractmethod
    def device_module(self) -> Any:
        """torch's namespace for the device, such as ``torch.cuda``, or an object that behaves like it."""

    # --- device -------------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        """Whether this process can use at least one device now."""
        return bool(self.device_module.is_available())

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

    @abstractmethod
    def communication_backend_name(self) -> str:
        """torch.distributed's backend for this device's tensors."""

    @abstractmethod
    def visible_devices_envvar(self) -> str:
        """The variable that masks devices for a new process."""

    def process_group_backend(self) -> str:
        """The string for ``init_process_group``: a CPU half, and the device's own where it is another device."""
        own = self.communication_backend_name()
        return f"cpu:{own}" if self.device_name == "cpu" else f"cpu:gloo,{self.device_name}:{own}"

    # --- profiling ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Name the enclosed block in the device's profiler; without one, do nothing."""
        yield

    def profiler_start(self) -> None:  # noqa: B027  a default that does nothing is the contract
        """Start the device's profiler; without one, do nothing."""

    def profiler_stop(self) -> None:  # noqa: B027  a default that does nothing is the contract
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

    @abstractmethod
    def ray_resource_name(self) -> str:
        """The Ray resource that counts this platform's devices."""

    def ray_resource_options(self, num_devices: float) -> dict[str, Any]:
        """Ray actor options that ask for ``num_devices`` of this platform."""
        name = self.ray_resource_name()
        return {"num_gpus": num_devices} if name == "GPU" else {"resources": {name: num_devices}}

    def ray_noset_envvars(self) -> list[str]:
        """Variables that keep Ray from setting this platform's device mask."""
        return []

    def is_ipc_supported(self) -> bool:
        """Whether two processes can share device memory by handle."""
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        """Environment that a rollout server of this platform needs."""
        return {}

    def get_device_uuid(self, device_id: int) -> str:
        """A name for the device that is the same in every process of the node."""
        mask = os.environ.get(self.visible_devices_envvar(), "")
        ids = [part.strip() for part in mask.split(",") if part.strip()]
        return f"{self.ray_resource_name()}-{ids[device_id] if ids else device_id}"

    # --- capabilities -------------------------------------------------------------------------------------------

    def supports(self, feature: str) -> tuple[bool, str]:
        """Whether ``feature`` works here, and why. Features: ``bf16``, ``fp16``, ``flash_attention_2``, ``ipc``,
        ``pinned_memory``, ``fsdp1``.

        Raises:
            ValueError: the feature is not one that platforms answer for.
        """
        try:
            return self._features()[feature]
        except KeyError:
            raise ValueError(f"unknown feature {feature!r}; legal: {', '.join(sorted(self._features()))}") from None

    def _features(self) -> dict[str, tuple[bool, str]]:
        from importlib.util import find_spec

        flash = find_spec("flash_attn") is not None
        return {
            "bf16": (True, "default"),
            "fp16": (True, "default"),
            "flash_attention_2": (flash, f"package flash_attn is {'' if flash else 'not '}installed"),
            "ipc": (self.is_ipc_supported(), "is_ipc_supported()"),
            "pinned_memory": (True, "default"),
            "fsdp1": (True, "default"),
        }
