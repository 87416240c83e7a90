"""Where a receiver's bytes go: straight into the model's own tensors where they are plain host memory.

A sink is told the manifest as it grows and says for each bucket where its bytes are to be written; the receiver
verifies them there and reports the bucket as done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from verl_fl.weight_sync import memory
from verl_fl.weight_sync._errors import SyncError
from verl_fl.weight_sync.manifest import Entry, Manifest, dtype_name
from verl_fl.weight_sync.staging import Staging

_SHOWN = 10


class Sink:
    """What all sinks share: a buffer in the order of its bytes for each tensor, and how much of each is still to come.

    Attributes:
        manifest: of the sync that runs.
        buffers: a contiguous tensor for each entry, of the entry's dtype and shape; aliases share one.
    """

    def __init__(self) -> None:
        self.manifest = Manifest(1)
        self.buffers: list[torch.Tensor] = []
        self._views: list[memoryview | None] = []
        self._missing: list[int] = []
        self._gap = bytearray(64)
        self.drawing = ""
        """The tensor that a consumer has now."""
        self._lock = threading.Lock()

    def begin(self, manifest: Manifest) -> None:
        """A sync starts; ``manifest`` is empty and will grow."""
        self.manifest, self.buffers, self._views, self._missing = manifest, [], [], []
        self._gap = bytearray(64)  # all senders fill gaps with zeros; a damaged bucket may have left something else

    def extend(self) -> None:
        """The manifest has grown.

        Raises:
            SyncError: there is no memory for an entry.
        """
        for entry in self.manifest.entries[len(self.buffers) :]:
            buffer = self.buffers[entry.alias_of] if entry.alias_of >= 0 else self._buffer(entry)
            self._missing.append(0 if entry.alias_of >= 0 else entry.num_bytes)
            self._views.append(memory.view(buffer) if memory.is_plain(buffer) else None)
            self.buffers.append(buffer)
            if not self._missing[-1]:
                self._arrived(len(self.buffers) - 1)

    def complete(self) -> None:
        """The manifest is whole.

        Raises:
            SyncError: it is not what is wanted here.
        """

    def parts(self, bucket: int, wait: Callable[[], None]) -> list[Any]:
        """Where the bucket's bytes are to be written; ``wait`` is called while there is no room, and may raise."""
        return memory.parts_of(self.manifest, bucket, self._views, self._gap)

    def done(self, bucket: int) -> None:
        """The bucket's bytes are there and verified."""
        for piece in self.manifest.pieces(bucket):
            with self._lock:
                self._missing[piece.tensor] -= piece.size
                arrived = not self._missing[piece.tensor]
            if arrived:
                self._arrived(piece.tensor)

    def settle(self, wait: Callable[[], None]) -> None:
        """Return when what came has been taken in, before this end confirms it; ``wait`` is called meanwhile."""

    def still_views(self) -> list[memoryview | None] | None:
        """The bytes of each tensor, if all lie still in host memory until the commit; None: they don't."""
        return None

    def all_done(self) -> None:
        """All buckets are there and verified, and :meth:`done` was not told."""

    def unchanged(self) -> bool:
        """Whether what the last sync left is still there, for a delta to start from."""
        return True

    def commit(self) -> None:
        """All has arrived and all ends agree: the new weights count from now on."""

    def fail(self, error: BaseException) -> None:
        """The sync is over; what has come does not count."""

    def _buffer(self, entry: Entry) -> torch.Tensor:
        raise NotImplementedError

    def _arrived(self, tensor: int) -> None:
        """The tensor's last byte is there."""


class Targets(Sink):
    """A model's tensors by name.

    Args:
        targets: what is written to. Of tied weights any of the names may come.
        keep_old: write into a copy first, so that a failed sync leaves the old weights as they were.
        keep_copy: hold a copy in host memory of what lies on a device, for deltas.
    """

    def __init__(self, targets: Mapping[str, torch.Tensor], *, keep_old: bool = False, keep_copy: bool = False) -> None:
        super().__init__()
        self._targets = {name: tensor.detach() for name, tensor in targets.items()}
        self._keep_old, self._keep_copy = keep_old, keep_copy
        self._copies: dict[str, torch.Tensor] = {}
        self._wrong_shape: list[str] = []
        self._staging: Staging | None = None
        self._staged: dict[int, Any] = {}
        self._versions: dict[str, int] = {}
        self._before: tuple[Any, list[int], list[torch.Tensor], list[memoryview | None]] = (None, [], [], [])
        """Manifest, targets' addresses, buffers and views of the last sync."""
        ties: dict[tuple, list[str]] = {}
        for name, tensor in self._targets.items():
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
            ties.setdefault(place, []).append(name)
        self._ties = list(ties.values())

    def dtypes(self) -> dict[str, str]:
        """What the sender casts floating-point tensors to: by name where it is not what most have, which is ``""``."""
        found = {name: dtype_name(t.dtype) for name, t in self._targets.items() if t.is_floating_point()}
        if not found:
            return {}
        most = max(set(found.values()), key=list(found.values()).count)
        return {"": most} | {name: dtype for name, dtype in found.items() if dtype != most}

    def begin(self, manifest: Manifest) -> None:
        super().begin(manifest)
        self._wrong_shape, self._staged = [], {}

    def extend(self) -> None:
        places = [tensor.data_ptr() for tensor in self._targets.values()]
        before, where, buffers, views = self._before
        if before is self.manifest and where == places and not self.buffers:
            self.buffers, self._views = list(buffers), list(views)
            self._missing = [0 if entry.alias_of >= 0 else entry.num_bytes for entry in before.entries]
            return
        super().extend()
        self._before = (self.manifest, places, self.buffers, self._views)

    def complete(self) -> None:
        entries = self.manifest.entries
        sent = {entry.name for entry in entries}
        # An alias that is unknown here is no loss where another name of the same bytes is known.
        known = {k if e.alias_of < 0 else e.alias_of for k, e in enumerate(entries) if e.name in self._targets}
        unknown = [e.name for k, e in enumerate(entries) if (k if e.alias_of < 0 else e.alias_of) not in known]
        missing = [names[0] for names in self._ties if sent.isdisjoint(names)]
        problems = {"of another shape": self._wrong_shape, "unknown here": unknown, "missing": missing}
        if any(problems.values()):
            raise SyncError(
                f"the two ends hold different models: {_listed(problems)}",
                phase="manifest",
                fix="sender and receiver need the same names and shapes",
            )

    def parts(self, bucket: int, wait: Callable[[], None]) -> list[Any]:
        on_host = all(self._views[piece.tensor] is not None for piece in self.manifest.pieces(bucket))
        if on_host:
            return super().parts(bucket, wait)
        if self._staging is None or self._staging.bucket_bytes != self.manifest.bucket_bytes:
            device = next(b.device for b in self.buffers if not memory.is_plain(b))
            self._staging = Staging(device, self.manifest.bucket_bytes)
        slot = self._staged[bucket] = self._staging.take(wait)
        return [slot.view[: self.manifest.bucket_size(bucket)]]

    def done(self, bucket: int) -> None:
        slot = self._staged.pop(bucket, None)
        if slot is not None:
            slot.to_device(
                (memory.as_bytes(self.buffers[p.tensor])[p.start : p.start + p.size], p.offset)
                for p in self.manifest.pieces(bucket)
            )
        super().done(bucket)

    def still_views(self) -> list[memoryview | None] | None:
        return self._views if all(view is not None for view in self._views) else None

    def all_done(self) -> None:
        for tensor in range(len(self.buffers)):
            self._arrived(tensor)

    def unchanged(self) -> bool:
        # What writes to a tensor through torch counts its version up; our own writes to the memory do not.
        return all(_version(self._targets[name]) == version for name, version in self._versions.items())

    def commit(self) -> None:
        if self._staging is not None:
            self._staging.synchronize()
        for tensor, entry in enumerate(self.manifest.entries):
            if self._keep_old or entry.alias_of >= 0:  # an alias: where the tie exists on the sender's end only
                self._install(tensor)
        direct = {buffer.data_ptr() for buffer in self.buffers if buffer.device.type == "cpu"}
        self._versions = {name: _version(t) for name, t in self._targets.items() if t.data_ptr() in direct}

    def fail(self, error: BaseException) -> None:
        self._staged = {}

    def _arrived(self, tensor: int) -> None:
        if not self._keep_old and self.manifest.entries[tensor].alias_of < 0:
            self._install(tensor)

    def _install(self, tensor: int) -> None:
        target = self._targets.get(self.manifest.entries[tensor].name)
        buffer = self.buffers[tensor]
        if target is None or target.shape != buffer.shape or not target.numel():
            return
        if target.data_ptr() != buffer.data_ptr() or target.device != buffer.device:
            target.copy_(buffer)

    def _buffer(self, entry: Entry) -> torch.Tensor:
        target = self._targets.get(entry.name)
        if target is not None and tuple(target.shape) != entry.shape:
            self._wrong_shape.append(f"{entry.name} {list(entry.shape)} (here {list(target.shape)})")
        elif target is not None and target.dtype == entry.dtype and not self._keep_old:
            if memory.is_plain(target):
                return target
            if target.is_contiguous() and not self._keep_copy:
                return target
        kept = self._copies.get(entry.name)
        if kept is None or kept.dtype != entry.dtype or tuple(kept.shape) != entry.shape:
            kept = self._copies[entry.name] = _empty(entry)
        return kept


class Stream(Sink):
    """For a consumer that draws ``(name, tensor)`` while they come, such as an inference server's loader.

    Args:
        window_bytes: what may lie here at once while the consumer is slower than the link; one bucket's tensors always
            may.
        keep_old: hold all until the sync is known to be whole, then hand it out.
        keep_copy: hold a copy of all in host memory, for deltas.
    """

    def __init__(self, *, window_bytes: int, keep_old: bool = False, keep_copy: bool = False) -> None:
        super().__init__()
        self._window_bytes, self._keep_old, self._keep_all = window_bytes, keep_old, keep_old or keep_copy
        self._copies: dict[str, torch.Tensor] = {}
        self._pool: dict[tuple, list[torch.Tensor]] = {}
        self._changed = threading.Condition()
        self._reset()

    def _reset(self) -> None:
        self._held, self._lowest, self.drawing = 0, 0, ""
        self._closed: set[int] = set()
        self._whole = self._committed = self._drawn = False
        self._error: BaseException | None = None
        self.recycle = True
        """Whether a buffer may be used again once the consumer has gone on; not while others still send from it."""

    def begin(self, manifest: Manifest) -> None:
        with self._changed:
            super().begin(manifest)
            self._reset()

    def extend(self) -> None:
        with self._changed:
            super().extend()
            self._changed.notify_all()

    def complete(self) -> None:
        with self._changed:
            self._whole = True
            self._changed.notify_all()

    def parts(self, bucket: int, wait: Callable[[], None]) -> list[Any]:
        if not self._keep_all:
            self._make_room(bucket, wait)
        return super().parts(bucket, wait)

    def done(self, bucket: int) -> None:
        with self._changed:
            self._closed.add(bucket)
            while self._lowest in self._closed:
                self._closed.remove(self._lowest)
                self._lowest += 1
            super().done(bucket)
            self._changed.notify_all()

    def settle(self, wait: Callable[[], None]) -> None:
        # A consumer that fails has failed the sync, also where the link was faster than it.
        with self._changed:
            while not self._keep_old and not self._drawn:
                self._changed.wait(0.2)
                wait()

    def commit(self) -> None:
        with self._changed:
            self._committed = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor once, in the manifest's order, valid until the next is drawn; ends when the sync is committed.

        Raises:
            SyncError: the sync failed.
        """
        tensor = 0
        while self._wait_for(tensor):
            entry = self.manifest.entries[tensor]
            self.drawing = entry.name
            yield entry.name, self.buffers[tensor if entry.alias_of < 0 else entry.alias_of]
            self._release(tensor)
            tensor += 1

    def _wait_for(self, tensor: int) -> bool:
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                there = tensor < len(self.buffers) and not self._missing[tensor]
                if there and (self._committed or not self._keep_old):
                    return True
                if self._whole and tensor == len(self.buffers):
                    if not self._drawn:
                        self._drawn = True
                        self._changed.notify_all()
                    if self._committed:
                        return False
                self._changed.wait(1.0)

    def _release(self, tensor: int) -> None:
        if self._keep_all:
            return
        with self._changed:
            owner = self.manifest.entries[tensor].alias_of
            owner = tensor if owner < 0 else owner
            buffer = self.buffers[owner]
            # A later alias hands the same bytes out again; a manifest that still grows may yet bring one.
            if not self._whole or any(e.alias_of == owner for e in self.manifest.entries[tensor + 1 :]):
                return
            self._held -= buffer.nbytes
            if self.recycle:
                self._pool.setdefault((buffer.dtype, buffer.shape), []).append(buffer)
            self._changed.notify_all()

    def _make_room(self, bucket: int, wait: Callable[[], None]) -> None:
        """The lowest bucket that has not come is always let in, or the consumer would wait for ever."""
        wanted = {p.tensor for p in self.manifest.pieces(bucket)}
        with self._changed:
            while True:
                wanted = {k for k in wanted if self._views[k] is None}
                need = sum(self.manifest.entries[k].num_bytes for k in wanted)
                if not need or self._held + need <= self._window_bytes or bucket == self._lowest:
                    break
                self._changed.wait(0.2)
                wait()
            for k in wanted:
                entry = self.manifest.entries[k]
                pooled = self._pool.get((entry.dtype, torch.Size(entry.shape)))
                self.buffers[k] = pooled.pop() if pooled else _empty(entry)
                self._views[k] = memory.view(self.buffers[k])
            self._held += need

    def _buffer(self, entry: Entry) -> torch.Tensor:
        if not self._keep_all and entry.num_bytes:
            return torch.empty(entry.shape, dtype=entry.dtype, device="meta")  # made when its first bytes come
        kept = self._copies.get(entry.name)
        if kept is None or kept.dtype != entry.dtype or tuple(kept.shape) != entry.shape:
            kept = self._copies[entry.name] = _empty(entry)
        return kept


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _empty(entry: Entry) -> torch.Tensor:
    try:
        return torch.empty(entry.shape, dtype=entry.dtype)
    except (RuntimeError, MemoryError) as error:
        raise SyncError(
            f"this receiver has no memory for {entry.num_bytes} bytes",
            phase="manifest",
            tensor=entry.describe(),
            fix="give the process more memory, or receive straight into the model's tensors",
        ) from error


def _listed(problems: dict[str, list[str]]) -> str:
    parts = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            parts.append(f"{len(names)} {kind}: {', '.join(names[:_SHOWN])}{more}")
    return "; ".join(parts)
