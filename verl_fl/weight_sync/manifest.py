"""What a sync carries: names, shapes and dtypes in order, laid out in one space of bytes that is cut into buckets.

Each tensor starts at a multiple of 64 bytes; bucket ``k`` is the bytes ``[k * bucket_bytes, (k + 1) * bucket_bytes)``,
so a tensor may span buckets and a bucket may hold many tensors, of any dtypes. Both ends compute the same layout from
the entries alone.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import xxhash

from verl_fl.weight_sync._errors import BadFrame

ALIGN = 64
MAX_NAME_BYTES, MAX_DIMS, MAX_TENSOR_BYTES = 4096, 32, 1 << 46
_HEAD = struct.Struct("<HBBI")
_NO_ALIAS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the manifest."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    alias_of: int = -1
    """Index of an earlier entry whose bytes these are (tied weights); -1: it has its own."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements, also where they are another entry's."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def describe(self) -> str:
        """``name dtype[shape]`` for messages."""
        return f"{self.name} {dtype_name(self.dtype)}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one tensor that lies in one bucket."""

    tensor: int
    """Index of the tensor in the manifest."""
    start: int
    """First byte, counted in the tensor."""
    size: int
    """Bytes."""
    offset: int
    """First byte, counted in the bucket."""


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def aligned(offset: int) -> int:
    """The next multiple of 64."""
    return -(-offset // ALIGN) * ALIGN


class Manifest:
    """Entries in order and where their bytes lie; grows at its end while a generator is drawn.

    Attributes:
        entries: the tensors so far.
        num_bytes: end of the last tensor's bytes.
    """

    def __init__(self, bucket_bytes: int, entries: Iterable[Entry] = ()) -> None:
        self.bucket_bytes = bucket_bytes
        self.entries: list[Entry] = []
        self.num_bytes = 0
        self.offsets: list[int] = []
        self._names: dict[str, int] = {}
        self._packed = (0, b"")
        self._starts: list[int] = []  # of tensors with bytes of their own, ascending
        self._owners: list[int] = []
        for entry in entries:
            self.append(entry)

    def append(self, entry: Entry) -> int:
        """Add a tensor; its index.

        Raises:
            ValueError: the name is there already, or the entry an alias of nothing like it.
        """
        if entry.name in self._names:
            raise ValueError(f"the name {entry.name!r} comes twice")
        index = len(self.entries)
        if entry.alias_of >= 0:
            base = self.entries[entry.alias_of] if entry.alias_of < index else None
            if base is None or base.alias_of >= 0 or (base.dtype, base.shape) != (entry.dtype, entry.shape):
                raise ValueError(f"{entry.describe()} is an alias of entry {entry.alias_of}, which is no such tensor")
            self.offsets.append(self.offsets[entry.alias_of])
        else:
            offset = aligned(self.num_bytes)
            self.offsets.append(offset)
            if entry.num_bytes:
                self._starts.append(offset)
                self._owners.append(index)
                self.num_bytes = offset + entry.num_bytes
        self.entries.append(entry)
        self._names[entry.name] = index
        return index

    def packed(self) -> bytes:
        """All entries as they travel."""
        if len(self._packed[1]) == 0 or self._packed[0] != len(self.entries):
            self._packed = len(self.entries), pack(self.entries)
        return self._packed[1]

    def index(self, name: str) -> int | None:
        """The entry's index by name."""
        return self._names.get(name)

    @property
    def num_buckets(self) -> int:
        """Buckets that the bytes so far fill or begin."""
        return -(-self.num_bytes // self.bucket_bytes)

    def bucket_size(self, bucket: int) -> int:
        """Bytes of one bucket; all are full but the last."""
        return min(self.bucket_bytes, self.num_bytes - bucket * self.bucket_bytes)

    def pieces(self, bucket: int) -> Iterator[Piece]:
        """The tensors' parts in one bucket, in order."""
        begin = bucket * self.bucket_bytes
        end = begin + self.bucket_bytes
        at = bisect.bisect_right(self._starts, begin) - 1
        for k in range(max(at, 0), len(self._starts)):
            first = self._starts[k]
            if first >= end:
                return
            last = first + self.entries[self._owners[k]].num_bytes
            low, high = max(first, begin), min(last, end)
            if low < high:
                yield Piece(self._owners[k], low - first, high - low, low - begin)

    def last_bucket(self, tensor: int) -> int:
        """The bucket in which the tensor's last byte lies; -1 where it has none."""
        num_bytes = self.entries[tensor].num_bytes
        return (self.offsets[tensor] + num_bytes - 1) // self.bucket_bytes if num_bytes else -1


def pack(entries: Iterable[Entry]) -> bytes:
    """Entries as they travel: see docs/weight-sync.md."""
    parts = []
    for entry in entries:
        name, dtype = entry.name.encode(), dtype_name(entry.dtype).encode()
        if len(name) > MAX_NAME_BYTES or len(entry.shape) > MAX_DIMS:
            raise ValueError(
                f"a name has at most {MAX_NAME_BYTES} bytes of UTF-8 and a shape at most {MAX_DIMS} dims, "
                f"not {len(name)} and {len(entry.shape)}: {entry.name[:200]}"
            )
        alias = _NO_ALIAS if entry.alias_of < 0 else entry.alias_of
        parts.append(_HEAD.pack(len(name), len(dtype), len(entry.shape), alias))
        parts += [name, dtype, struct.pack(f"<{len(entry.shape)}Q", *entry.shape)]
    return b"".join(parts)


def unpack(data: bytes | memoryview, peer: str = "") -> list[Entry]:
    """The entries in ``data``; all sizes are checked before anything is made of them.

    Raises:
        BadFrame: the bytes are no entries, or claim what no tensor can be.
    """
    data, at = bytes(data), 0
    entries: list[Entry] = []

    def take(size: int) -> bytes:
        nonlocal at
        if at + size > len(data):
            raise BadFrame(f"the manifest ends inside entry {len(entries)}", phase="manifest", peer=peer)
        at += size
        return data[at - size : at]

    while at < len(data):
        name_size, dtype_size, num_dims, alias = _HEAD.unpack(take(_HEAD.size))
        if not 0 < name_size <= MAX_NAME_BYTES or num_dims > MAX_DIMS:
            found = f"a name of {name_size} bytes and {num_dims} dims"
            raise BadFrame(f"manifest entry {len(entries)} claims {found}", phase="manifest", peer=peer)
        try:
            name, dtype_text = take(name_size).decode(), take(dtype_size).decode("ascii")
        except UnicodeDecodeError as error:
            raise BadFrame(f"manifest entry {len(entries)} is not text", phase="manifest", peer=peer) from error
        shape = struct.unpack(f"<{num_dims}Q", take(8 * num_dims))
        dtype = vars(torch).get(dtype_text)  # not getattr: torch imports some names when they are asked for
        if not isinstance(dtype, torch.dtype):
            raise BadFrame(
                f"the dtype {dtype_text!r} is unknown to torch {torch.__version__}",
                phase="manifest",
                peer=peer,
                tensor=name,
                fix="use the same torch on both ends",
            )
        _check_size(name, dtype, shape, peer)
        entries.append(Entry(name, dtype, shape, -1 if alias == _NO_ALIAS else alias))
    return entries


def _check_size(name: str, dtype: torch.dtype, shape: tuple[int, ...], peer: str) -> None:
    # Python's integers don't wrap; a zero among the dims must not hide an absurd other one.
    size = dtype.itemsize
    for dim in shape:
        size *= max(dim, 1)
        if size > MAX_TENSOR_BYTES:
            found = f"shape {list(shape)} of {dtype_name(dtype)} is over {MAX_TENSOR_BYTES >> 40} TiB"
            raise BadFrame(found, phase="manifest", peer=peer, tensor=name)


def digest(packed: bytes) -> int:
    """64-bit digest of packed entries."""
    return xxhash.xxh3_64_intdigest(packed)
