"""The CPU as a platform: a torch device of its own, not a GPU in disguise."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

from verl_fl.platform.base import Platform, Probe


class _Event:
    """An event on a device whose work is finished when the call returns."""

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream(_Event):
    """The only stream there is: the caller's own order."""

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class CPUDeviceModule:
    """What ``torch.cuda`` is to CUDA, for the CPU. Memory figures are the operating system's, in bytes.

    "Allocated" is this process's resident memory; "reserved" is the same, since nothing is cached in between; the
    maximum is the highest value seen at a query, or the kernel's own high-water mark where it keeps one.
    """

    Stream = _Stream
    Event = _Event

    def __init__(self) -> None:
        self._peak = 0
        self._kernel_peak_at_reset = 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def set_device(self, device: object) -> None:
        if device not in (0, None) and str(device) != "cpu":
            raise ValueError(
                f"set_device({device!r}): a CPU node has one device, 0; use more workers, not more devices"
            )

    def device(self, device: object = None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: object = None) -> None:
        pass

    def get_device_name(self, device: object = None) -> str:
        return "cpu"

    def get_device_capability(self, device: object = None) -> tuple[None, None]:
        return (None, None)

    def get_device_properties(self, device: object = None) -> Any:
        return SimpleNamespace(
            name="cpu", total_memory=self.mem_get_info()[1], multi_processor_count=os.cpu_count() or 1
        )

    # --- random numbers: the CPU's generator is torch's default one ---

    def manual_seed(self, seed: int) -> None:
        import torch

        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: object = "cpu") -> torch.Tensor:
        import torch

        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = "cpu") -> None:
        import torch

        torch.set_rng_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        import torch

        return [torch.get_rng_state()]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        import torch

        torch.set_rng_state(states[0])

    def initial_seed(self) -> int:
        import torch

        return torch.initial_seed()

    # --- memory ---

    def empty_cache(self) -> None:
        """Give what :func:`keep_freed_memory` kept back to the system, once free memory is below a quarter."""
        available, total = self.mem_get_info()
        if available < total // 4 and (trim := _libc("malloc_trim")) is not None:
            trim(0)

    def ipc_collect(self) -> None:
        pass

    def memory_allocated(self, device: object = None) -> int:
        used = _resident()
        self._peak = max(self._peak, used)
        return used

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: object = None) -> int:
        current = self.memory_allocated()
        kernel_peak = _kernel_peak()
        if kernel_peak > self._kernel_peak_at_reset:
            self._peak = max(self._peak, kernel_peak)
        return max(self._peak, current)

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self._kernel_peak_at_reset = _kernel_peak()
        self._peak = 0

    reset_max_memory_allocated = reset_peak_memory_stats

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """``(available, total)``, within the control group's limit where there is one."""
        available, total = _host_memory()
        limit, used = _cgroup_memory()
        if limit is None or limit >= total:
            return available, total
        return min(available, limit - used), limit

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    def memory_summary(self, device: object = None, abbreviated: bool = False) -> str:
        available, total = self.mem_get_info()
        return f"cpu: resident {self.memory_allocated()} B, available {available} B of {total} B"

    # --- streams ---

    def current_stream(self, device: object = None) -> _Stream:
        return _Stream()

    default_stream = current_stream

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_HEAP_BLOCKS = (1 << 30, 32 << 20)
"""What to ask for, in bytes; some glibc take no more than the second."""


def usable_cores() -> int:
    """Cores that this process may run on, which a container or a mask can make fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> bool:
    """Let this process reuse its large blocks instead of returning each to the system; True where glibc can.

    Activations come and go at every layer, and a fresh page costs more than the work on it.
    :meth:`CPUDeviceModule.empty_cache` gives the memory back when it becomes scarce. Idempotent.
    """
    mallopt = _libc("mallopt")
    if mallopt is None:
        return False
    kept = any(mallopt(_M_MMAP_THRESHOLD, size) for size in _LARGEST_HEAP_BLOCKS)
    return bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)) and kept


def _libc(name: str) -> Any:
    """A function of the C library, or None where it has none of that name (musl, macOS)."""
    return getattr(ctypes.CDLL(None), name, None)


def _resident() -> int:
    """Resident bytes of this process; the high-water mark where the system does not tell the current value."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return _kernel_peak()


def _host_memory() -> tuple[int, int]:
    """``(available, total)`` bytes of the host."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo") as meminfo:
            rows = dict(line.split(":", 1) for line in meminfo)
        return int(rows["MemAvailable"].split()[0]) * 1024, total
    except (OSError, KeyError):
        return total - _resident(), total


def _kernel_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _cgroup_memory() -> tuple[int | None, int]:
    """``(limit, used)`` of this process's control group in bytes; no limit is ``(None, 0)``."""
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit_file) as limit, open(used_file) as used:
                text = limit.read().strip()
                return (None, 0) if text == "max" else (int(text), int(used.read()))
        except (OSError, ValueError):
            continue
    return None, 0


class CPUPlatform(Platform):
    """Trains and generates on the host's cores. One device a node; several workers may share it."""

    name = device_name = vendor_name = "cpu"
    collective = "gloo"
    # A variable of our own that nothing sets: the operating system masks cores, not a list of ids.
    visible_devices = "VERL_FL_CPU_VISIBLE_DEVICES"
    # Slots for worker processes. Ray's own CPU can't stand in a custom resource request.
    ray_resource = "fl_cpu"
    features: ClassVar[Mapping[str, tuple[bool, str]]] = {
        "fp16": (False, "torch's CPU kernels have no loss scaling and most fp16 operators run unvectorised"),
        "flash_attention_2": (False, "FlashAttention has no CPU kernel; torch's sdpa is used"),
        "ipc": (False, "host memory is shared by other means"),
        "pinned_memory": (False, "host memory is the device memory"),
        "fsdp1": (False, "FSDP1 synchronises module states on an accelerator only; FSDP2 works"),
        "streams": (False, "work on the CPU is done when the call returns"),
    }

    _module = CPUDeviceModule()

    @classmethod
    def probe(cls) -> Probe:
        """Every machine is one."""
        return Probe(found=True, reason=f"{usable_cores()} cores usable by this process")

    @functools.cached_property
    def device_module(self) -> CPUDeviceModule:
        """The host as a device."""
        return self._module

    def current_device(self) -> torch.device:
        """``torch.device("cpu")``: a bare index would mean an accelerator to torch."""
        import torch

        return torch.device("cpu")

    def ray_noset_envvars(self) -> list[str]:
        """None: Ray sets no mask for cores."""
        return []
