"""Buckets between a device and the link: a few buffers of host memory, copied to and from on a side stream."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from verl_fl.weight_sync import memory
from verl_fl.weight_sync._errors import SyncError

SLOTS = 3
"""Buffers a stage: one is filled, one is on its way, one is being emptied."""


class Slot:
    """One buffer: bytes on their way from or to the device.

    Attributes:
        tensor: its memory, uint8.
        view: the same.
    """

    def __init__(self, pool: Staging, tensor: torch.Tensor) -> None:
        self.view = memory.view(tensor)
        self.tensor, self._pool = tensor, pool
        self._event: Any = None

    def to_device(self, moves: Iterable[tuple[torch.Tensor, int]]) -> None:
        """Queue copies to ``(target, offset in the slot)``, uint8 of one dim; the slot is free once they are done."""

        def work() -> None:
            for target, offset in moves:
                target.copy_(self.tensor[offset : offset + target.numel()], non_blocking=True)

        self._event = self._pool.on_stream(work)
        self._pool.give_back(self)

    def from_device(self, moves: Iterable[tuple[torch.Tensor, int, torch.dtype]], *, lent: bool = False) -> None:
        """Queue copies of ``(source of one dim, offset in the slot, dtype to cast to)``; :meth:`wait` ends them.

        Args:
            lent: the source may change as soon as the caller goes on; its stream then waits for the copy.
        """

        def work() -> None:
            for source, offset, dtype in moves:
                mine = self.tensor[offset : offset + source.numel() * dtype.itemsize].view(dtype)
                mine.copy_(source, non_blocking=True)

        self._event = self._pool.on_stream(work, hold_caller=lent)

    def wait(self) -> None:
        """Return when the queued copies are done."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def free(self) -> None:
        """Nobody needs the bytes any more."""
        self._pool.give_back(self)


class Staging:
    """The buffers of one direction between one device and the host.

    Args:
        device: where the tensors are; ``cpu`` for tensors that are only gathered.
        bucket_bytes: size of each buffer.
        num_slots: how many there are.
    """

    def __init__(self, device: torch.device, bucket_bytes: int, num_slots: int = SLOTS) -> None:
        self.device, self.bucket_bytes = device, bucket_bytes
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None
        if self._module is not None and hasattr(self._module, "Stream"):
            self._stream = self._module.Stream(device=device)  # in whichever thread: their current devices differ
        self._free = collections.deque(Slot(self, self._memory()) for _ in range(num_slots))
        self._changed = threading.Condition()

    def take(self, wait: Callable[[], None]) -> Slot:
        """A buffer that nothing reads or writes any more; ``wait`` is called while there is none, and may raise."""
        with self._changed:
            while not self._free:
                self._changed.wait(0.2)
                wait()
            slot = self._free.popleft()
        slot.wait()
        return slot

    def give_back(self, slot: Slot) -> None:
        """See :meth:`Slot.free`."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def on_stream(self, work: Callable[[], None], *, hold_caller: bool = False) -> Any:
        """Run ``work`` on the side stream, after what the caller's stream holds; the event of its end, or None."""
        if self._module is None:
            return work()
        if self._stream is None:
            work()
            self._module.synchronize()
            return None
        caller = self._module.current_stream(self.device)
        self._stream.wait_stream(caller)
        with self._module.stream(self._stream):
            work()
            event = self._module.Event()
            event.record(self._stream)
        if hold_caller:
            caller.wait_event(event)
        return event

    def synchronize(self) -> None:
        """Return when all queued copies are done."""
        if self._stream is not None:
            self._stream.synchronize()

    def _memory(self) -> torch.Tensor:
        if self._module is not None:
            try:
                return torch.empty(self.bucket_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:
                pass  # no pinned memory here: the copies are slower, and still right
        try:
            return torch.empty(self.bucket_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise SyncError(
                f"no host memory for a buffer of {self.bucket_bytes} bytes", phase="buckets", fix="use smaller buckets"
            ) from error
