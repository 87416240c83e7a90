"""What a vendor's SDK does when it is imported: make torch know the device. One device type a process, as in torch."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl_fl._errors import explain
from verl_fl.testing.simulated._build import extension
from verl_fl.testing.simulated.chip import Chip

_installed: Chip | None = None


class DeviceModule(types.ModuleType):
    """``torch.<name>``: the functions that ``torch.cuda`` has, for this chip."""

    def __init__(self, chip: Chip, ids: list[int]) -> None:
        super().__init__(f"torch.{chip.name}")
        self._chip, self._ids, self._c = chip, ids, extension()
        self.default_generators: tuple[torch.Generator, ...] = ()

    # --- devices ---

    def is_available(self) -> bool:
        return bool(self._ids)

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return len(self._ids)

    def current_device(self) -> int:
        return self._c.current_device()

    def set_device(self, device: Any) -> None:
        self._c.set_device(self._index(device))

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self._c.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self._c.set_device(before)

    def synchronize(self, device: Any = None) -> None:
        self._c.synchronize(self._index(device))

    def get_device_name(self, device: Any = None) -> str:
        return f"simulated {self._chip.name}, id {self._ids[self._index(device)]}"

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        self._index(device)
        return (1, 0)

    def get_device_properties(self, device: Any = None) -> types.SimpleNamespace:
        name = self.get_device_name(device)
        return types.SimpleNamespace(name=name, total_memory=self._chip.memory_bytes, multi_processor_count=1)

    def is_bf16_supported(self) -> bool:
        return self._chip.bf16

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16] if self._chip.bf16 else [torch.float16]

    def _index(self, device: Any) -> int:
        if device is None:
            return self._c.current_device()
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self._c.current_device() if index is None else index

    # --- random numbers ---

    def _generator(self, device: Any = None) -> torch.Generator:
        return torch.get_device_module(self._chip.name).default_generators[self._index(device)]

    def manual_seed(self, seed: int) -> None:
        self._generator().manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def initial_seed(self) -> int:
        return self._generator().initial_seed()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self._generator(device).get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self._generator(device).set_state(state.cpu())

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.default_generators]

    def set_rng_state_all(self, states: Iterable[torch.Tensor]) -> None:
        for generator, state in zip(self.default_generators, states, strict=True):
            generator.set_state(state.cpu())

    # --- memory, in bytes: nothing is cached, so reserved is allocated ---

    def empty_cache(self) -> None:
        pass

    def ipc_collect(self) -> None:
        pass

    def memory_allocated(self, device: Any = None) -> int:
        return self._c.memory(self._index(device))[0]

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._c.memory(self._index(device))[1]

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._c.reset_peak(self._index(device))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        total = self._chip.memory_bytes
        return total - self.memory_allocated(device), total

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        now, peak = self._c.memory(self._index(device))
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak}

    def memory_summary(self, device: Any = None, abbreviated: bool = False) -> str:
        return f"{self._chip.name}: {self.memory_allocated(device)} B of {self._chip.memory_bytes} B"

    # --- streams ---

    class Event(torch.Event):
        """An event of this chip, with the arguments of ``torch.cuda.Event``."""

        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            name = _chip().name
            return super().__new__(cls, name, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    class Stream(torch.Stream):
        """A new stream on ``device``, by default the current one."""

        def __new__(cls, device: Any = None, priority: int = 0) -> Any:
            module = torch.get_device_module(_chip().name)
            return super().__new__(cls, device=f"{_chip().name}:{module._index(device)}", priority=priority)

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(f"{self._chip.name}:{self._index(device)}")

    def default_stream(self, device: Any = None) -> torch.Stream:
        return torch.Stream(stream_id=0, device_index=self._index(device), device_type=20)

    def set_stream(self, stream: torch.Stream | None) -> None:
        if stream is not None:
            torch.accelerator.set_stream(stream)

    @contextlib.contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    # --- what only a simulated chip has ---

    def set_strict(self, strict: bool) -> None:
        """Raise, or not, where work of one stream is not ordered after the work of another that it depends on."""
        self._c.set_strict(strict)

    def set_fault(self, fault: str = "") -> None:
        """Break the chip, for tests of tests: an operator by its name (``aten::argmax``) adds one to its results;
        ``copies`` changes int16, ``all_reduce`` its sum, ``memory`` the kind of error, ``bf16`` takes the dtype away.
        """
        self._c.set_bf16(self._chip.bf16 and fault != "bf16")
        self._c.set_fault(fault)

    def set_copy_engine(self, *, bytes_per_s: float, lag_s: float = 0.0) -> None:
        """Give both copy engines of every device this speed (0: unlimited), and side streams this lag."""
        self._c.set_copy_engine(bytes_per_s, lag_s)

    def take_trace(self) -> list[tuple[int, int, str, int, float, float]]:
        """Copies since the last call: (device, stream, "to_host" or "to_device", bytes, start in s, end in s)."""
        return self._c.take_trace()

    def watch_host(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which an operator on a host tensor raises as :meth:`check_host` does."""
        return _HostWatch(self)

    def check_host(self, tensor: torch.Tensor, *, write: bool = False) -> None:
        """Raise where a copy that the host has not waited for may still use this host tensor."""
        self._c.check_host(tensor, write)


class _HostWatch(TorchDispatchMode):
    def __init__(self, module: DeviceModule) -> None:
        super().__init__()
        self._module = module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if all(tensor.device.type == "cpu" for tensor in tensors):
            written = {id(args[i]) for i, arg in enumerate(func._schema.arguments[: len(args)]) if _writes(arg)}
            for tensor in tensors:
                self._module.check_host(tensor, write=id(tensor) in written)
        return func(*args, **kwargs)


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _chip() -> Chip:
    assert _installed is not None
    return _installed


def visible_ids(chip: Chip) -> list[int]:
    """The ids that the mask shows, in its order; ids that don't exist are left out, as some runtimes do."""
    mask = os.environ.get(chip.mask)
    if mask is None:
        return list(range(chip.device_count))
    ids = [int(part) for part in mask.split(",") if part.strip().isdigit()]
    return [number for number in ids if number < chip.device_count]


def install(chip: Chip) -> DeviceModule:
    """Make ``torch.<chip.name>`` a device of this process. Reads the mask now and never again. Idempotent.

    Raises:
        RuntimeError: another chip is installed, or the device can't be compiled here.
    """
    global _installed
    if _installed is not None:
        if _installed.name != chip.name:
            raise RuntimeError(_second(chip, _installed))
        return torch.get_device_module(chip.name)
    ids = visible_ids(chip)
    extension().configure(
        chip.name, len(ids), chip.memory_bytes, chip.bf16, chip.copy_bytes_per_s, chip.lag_s, chip.strict
    )
    module = DeviceModule(chip, ids)
    torch.utils.rename_privateuse1_backend(chip.name)
    torch._register_device_module(chip.name, module)
    module.default_generators = tuple(extension().default_generator(index) for index in range(len(ids)))
    torch.utils.generate_methods_for_privateuse1_backend()
    if torch.distributed.is_available():
        _register_collectives(chip)
    _installed = chip
    return module


def _second(chip: Chip, first: Chip) -> str:
    return explain(
        f"torch has one foreign device type a process, and here it is {first.name!r}",
        asked=f"a simulated {chip.name!r}",
        fix="use the second chip in another process",
    )


def _register_collectives(chip: Chip) -> None:
    import torch.distributed as dist

    def create(options: Any, _: Any) -> Any:
        gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
        return extension().collectives(gloo, chip.collective)

    dist.Backend.register_backend(chip.collective, create, extended_api=True, devices=[chip.name])
