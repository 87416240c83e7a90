"""What a sender draws its buckets from: the model's tensors, cast once, without a copy wherever their memory allows.

A mapping's tensors hold still until the sync is over, so their bytes are sent from where they lie. A generator may take
back what it lent as soon as it is asked for the next tensor (merged LoRA does), so its bytes are copied to staging
buffers first. What lies on a device is copied to staging buffers on a side stream, ahead of the link.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from verl_fl.weight_sync import memory, pump
from verl_fl.weight_sync.edge import Bucket, Run
from verl_fl.weight_sync.manifest import Entry, Manifest, Piece
from verl_fl.weight_sync.staging import SLOTS, Slot, Staging

Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class Source:
    """Cuts named tensors into the buckets of one rank.

    Args:
        bucket_bytes: of each bucket; a multiple of 64.
        rank: this rank; it makes the buckets ``rank``, ``rank + num_ranks``, ...
        dtype_of: what a floating-point tensor is cast to, by its name; None: it is sent as it is.
        staging: keeps the staging buffers between syncs.
        grown: called with the manifest and the first new entry whenever a bucket needs it, and once, with True, when
            all are known.
        wait: called while there is no free staging buffer; may raise.
        run: keeps the layout of tensors in plain host memory between syncs, which then come as one run; None: they come
            as buckets, such as deltas need.

    Attributes:
        manifest: as far as the weights were drawn.
        overflowed: finite values by tensor that the cast made infinite.
        seconds: busy time by stage.
    """

    def __init__(
        self,
        bucket_bytes: int,
        *,
        rank: int,
        num_ranks: int,
        dtype_of: Callable[[str], torch.dtype | None],
        staging: dict[tuple, Staging],
        grown: Callable[[Manifest, int, bool], None],
        wait: Callable[[], None],
        run: dict[str, Any] | None = None,
    ) -> None:
        self._rank, self._num_ranks, self._dtype_of = rank, num_ranks, dtype_of
        self._pools, self._grown, self._wait = staging, grown, wait
        self.manifest = Manifest(bucket_bytes)
        self.overflowed: dict[str, int] = {}
        self.seconds = {"gather": 0.0, "copy": 0.0}
        self._told = 0
        self._run = run

    def buckets(self, weights: Weights) -> Iterator[Bucket | Run]:
        """This rank's buckets in order; the manifest has been told up to the end of each that is yielded.

        Raises:
            ValueError: a name comes twice, or something is no tensor that can be sent.
        """
        if isinstance(weights, Mapping) and not any(hasattr(t, "full_tensor") for t in weights.values()):
            yield from self._from_mapping(weights)
        else:
            yield from self._from_generator(weights.items() if isinstance(weights, Mapping) else weights)

    # --- tensors that hold still ---

    def _from_mapping(self, weights: Mapping[str, torch.Tensor]) -> Iterator[Bucket | Run]:
        for name, tensor in weights.items():
            _check(name, tensor)
        key = [_place(name, tensor) for name, tensor in weights.items()] if self._run is not None else []
        wire = [self._wire_dtype(name, tensor) for name, tensor in weights.items()] if self._run is not None else []
        if self._run is not None and self._run.get("key") == (self.manifest.bucket_bytes, key, wire):
            self.manifest = self._run["manifest"]
            self._tell(whole=True)
            yield self._again(list(weights.values()))
            return
        seen: dict[tuple, int] = {}
        tensors = []
        for name, tensor in weights.items():
            tensor = _sendable(name, tensor)
            dtype = self._wire_dtype(name, tensor)
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, dtype)
            alias = seen.get(place, -1) if tensor.numel() else -1
            index = self.manifest.append(Entry(name, dtype, tuple(tensor.shape), alias))
            seen.setdefault(place, index)
            tensors.append(tensor)
        self._tell(whole=True)
        entries = self.manifest.entries
        plain = [memory.is_plain(t) and t.dtype == entry.dtype for t, entry in zip(tensors, entries, strict=True)]
        if self._run is not None and all(plain) and pump.kernel()[0] is not None:
            layout = pump.Layout(self.manifest, [memory.view(tensor) for tensor in tensors], sending=True)
            self._run |= {"key": (self.manifest.bucket_bytes, key, wire), "manifest": self.manifest, "layout": layout}
            yield self._again(tensors)
            return
        views = [memory.view(t) if direct else None for t, direct in zip(tensors, plain, strict=True)]
        under_way: collections.deque[tuple[Bucket, Slot]] = collections.deque()
        flat = _Flat()
        for index in range(self._rank, self.manifest.num_buckets, self._num_ranks):
            pieces = list(self.manifest.pieces(index))
            if all(plain[piece.tensor] for piece in pieces):
                while under_way:
                    yield self._landed(*under_way.popleft())
                bytes_of = [
                    (memory.as_bytes(tensors[p.tensor])[p.start : p.start + p.size], self._itemsize(p), p.offset)
                    for p in pieces
                ]
                yield Bucket(index, memory.parts_of(self.manifest, index, views), pieces=bytes_of, keep=tensors)
                continue
            slot = self._slot(tensors[next(p.tensor for p in pieces if not plain[p.tensor])].device)
            self._copy(slot, [(piece, flat.of(piece.tensor, tensors[piece.tensor])) for piece in pieces])
            under_way.append((self._staged(index, pieces, slot), slot))
            if len(under_way) == SLOTS - 1:
                yield self._landed(*under_way.popleft())
        while under_way:
            yield self._landed(*under_way.popleft())

    def _again(self, tensors: list[torch.Tensor]) -> Run:
        """All of this rank's buckets; their layout holds from sync to sync while the tensors stay where they are."""
        assert self._run is not None
        layout = self._run["layout"]
        layout.reset()
        return Run(layout, range(self._rank, self.manifest.num_buckets, self._num_ranks), tensors)

    # --- tensors that are lent until the next is drawn ---

    def _from_generator(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Bucket]:
        open_slots: dict[int, Slot] = {}
        pieces: dict[int, list[Piece]] = collections.defaultdict(list)
        iterator = iter(weights)
        while True:
            begin = time.perf_counter()
            item = next(iterator, None)
            if item is None:
                break
            name, tensor = item if isinstance(item, tuple | list) and len(item) == 2 else (item, None)
            tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            self.seconds["gather"] += time.perf_counter() - begin
            tensor = _sendable(name, tensor)
            index = self.manifest.append(Entry(name, self._wire_dtype(name, tensor), tuple(tensor.shape)))
            flat = tensor.reshape(-1)
            for bucket in self._mine(index):
                piece = next(p for p in self.manifest.pieces(bucket) if p.tensor == index)
                if bucket not in open_slots:
                    # Full ones leave first: a tensor may span more buckets than there are buffers.
                    yield from self._full(open_slots, pieces, self.manifest.offsets[index] + piece.start)
                    open_slots[bucket] = self._slot(tensor.device)
                pieces[bucket].append(piece)
                self._copy(open_slots[bucket], [(piece, flat)], lent=True)
            yield from self._full(open_slots, pieces, self.manifest.num_bytes)
        self._tell(whole=True)
        for bucket in sorted(open_slots):
            yield self._landed(self._staged(bucket, pieces.pop(bucket), open_slots[bucket]), open_slots[bucket])

    def _mine(self, tensor: int) -> Iterator[int]:
        """The buckets of this rank in which the tensor has bytes."""
        first = self.manifest.offsets[tensor] // self.manifest.bucket_bytes
        first += (self._rank - first) % self._num_ranks
        return iter(range(first, self.manifest.last_bucket(tensor) + 1, self._num_ranks))

    def _full(self, slots: dict[int, Slot], pieces: dict[int, list[Piece]], end: int) -> Iterator[Bucket]:
        for bucket in [b for b in slots if (b + 1) * self.manifest.bucket_bytes <= end]:
            self._tell(whole=False)
            slot = slots.pop(bucket)
            yield self._landed(self._staged(bucket, pieces.pop(bucket), slot), slot)

    # --- both ---

    def _tell(self, *, whole: bool) -> None:
        if self._told < len(self.manifest.entries) or whole:
            self._grown(self.manifest, self._told, whole)
        self._told = len(self.manifest.entries)

    def _slot(self, device: torch.device) -> Slot:
        key = (str(device), self.manifest.bucket_bytes)
        if key not in self._pools:
            self._pools[key] = Staging(device, self.manifest.bucket_bytes, SLOTS + 1)
        return self._pools[key].take(self._wait)

    def _copy(self, slot: Slot, moves: list[tuple[Piece, torch.Tensor]], *, lent: bool = False) -> None:
        begin = time.perf_counter()
        casts = []
        for piece, flat in moves:
            entry = self.manifest.entries[piece.tensor]
            low, high = piece.start // entry.dtype.itemsize, (piece.start + piece.size) // entry.dtype.itemsize
            casts.append((flat[low:high], piece.offset, entry.dtype))
        slot.from_device(casts, lent=lent)
        for (source, offset, dtype), (piece, _) in zip(casts, moves, strict=True):
            if source.dtype != dtype:
                slot.wait()
                self._count_overflow(piece.tensor, source, slot.tensor[offset : offset + piece.size].view(dtype))
        self.seconds["copy"] += time.perf_counter() - begin

    def _count_overflow(self, tensor: int, source: torch.Tensor, cast: torch.Tensor) -> None:
        lost = int((~torch.isfinite(cast.float())).sum())
        if lost:
            lost -= int((~torch.isfinite(source.float())).sum())
        if lost:
            name = self.manifest.entries[tensor].name
            self.overflowed[name] = self.overflowed.get(name, 0) + lost

    def _staged(self, index: int, pieces: list[Piece], slot: Slot) -> Bucket:
        size, at = self.manifest.bucket_size(index), 0
        for piece in pieces:  # what lies between tensors is zero, or the ends would differ in bytes that nobody has
            slot.view[at : piece.offset] = bytes(piece.offset - at)
            at = piece.offset + piece.size
        slot.view[at:size] = bytes(size - at)
        bytes_of = [(slot.tensor[p.offset : p.offset + p.size], self._itemsize(p), p.offset) for p in pieces]
        return Bucket(index, [slot.view[:size]], pieces=bytes_of, release=slot.free)

    def _landed(self, bucket: Bucket, slot: Slot) -> Bucket:
        begin = time.perf_counter()
        slot.wait()
        self.seconds["copy"] += time.perf_counter() - begin
        return bucket

    def _itemsize(self, piece: Piece) -> int:
        return min(self.manifest.entries[piece.tensor].dtype.itemsize, 8)

    def _wire_dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        if not isinstance(tensor, torch.Tensor):
            return torch.uint8  # refused where it is drawn
        return (self._dtype_of(name) or tensor.dtype) if tensor.is_floating_point() else tensor.dtype


class _Flat:
    """The last tensor in one dim; a strided one is copied once, however many buckets it spans."""

    def __init__(self) -> None:
        self._index, self._flat = -1, torch.empty(0)

    def of(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        if index != self._index:
            self._index, self._flat = index, tensor.reshape(-1)
        return self._flat


def _place(name: Any, tensor: Any) -> tuple:
    """Differs where the tensor is another, lies elsewhere, or is read differently."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.device.type == "meta":
        return (name,)  # refused where it is drawn
    flags = tensor.is_neg(), tensor.is_complex() and tensor.is_conj(), tensor.layout
    return name, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, flags


def _sendable(name: Any, tensor: Any) -> torch.Tensor:
    _check(name, tensor)
    tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg()


def _check(name: Any, tensor: Any) -> None:
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"weights are pairs of a name and a tensor, not {type(name).__name__}, {type(tensor).__name__}"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise ValueError(f"{name!r} is {tensor.layout} on {tensor.device}: only dense tensors with data can be sent")
