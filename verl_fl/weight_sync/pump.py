"""``pump.c``: whole buckets between plain host memory and sockets or rings, with Python's lock released throughout.

Used where it can be had and the bytes lie still; everywhere else, and without a C compiler, the same frames are made in
Python (``edge.py``, ``incoming.py``).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import xxhash

from verl_fl._compile import Unavailable, load
from verl_fl.weight_sync import memory
from verl_fl.weight_sync._errors import BadFrame, SyncError
from verl_fl.weight_sync.manifest import ALIGN, Manifest

logger = logging.getLogger("verl_fl.weight_sync")

REASONS = {
    -4: "came twice",
    -5: "is none of this model's, or has another size",
    -6: "arrived damaged: its checksum differs",
    -7: "has a damaged header",
    -8: "is said to lie in shared memory that is not there",
}
"""What is wrong with a bucket, by the loop's code."""

DONE, TICK, CLOSED, STRANGE, TWICE, WRONG_SIZE, DAMAGED, BAD_HEADER, NO_SLOT = range(0, -9, -1)
_FLAGS = ("-O3",)
_GAP = (ctypes.c_ubyte * ALIGN)()
"""What lies between two tensors: sent as zeros, received into ``_WASTE``."""
_WASTE = (ctypes.c_ubyte * ALIGN)()


class _Hash(ctypes.Structure):
    _fields_ = [("state", ctypes.c_void_p), *((name, ctypes.c_void_p) for name in ("reset", "update", "digest"))]


class _Layout(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("num_buckets", "bucket_bytes", "num_bytes")),
        *((name, ctypes.c_void_p) for name in ("first", "parts", "checksum", "state")),
        ("missing", ctypes.c_int64),
    ]


class _Ring(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("slot_bytes", ctypes.c_uint64), ("num_slots", ctypes.c_uint64)]


class Progress(ctypes.Structure):
    """What one call of a loop leaves for the next; ``header`` is the frame at which it stopped."""

    _fields_ = [
        ("header", ctypes.c_ubyte * 64),
        ("at", ctypes.c_uint64),
        ("bucket", ctypes.c_uint64),
        ("hashed", ctypes.c_uint64),
        ("trailer", ctypes.c_ubyte * 8),
        ("inside", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


@functools.cache
def kernel() -> tuple[ctypes.CDLL | None, str]:
    """The compiled loops; None, with the reason, where they can't be had."""
    try:
        library = load(Path(__file__).with_name("pump.c"), _FLAGS)
        _hash_functions()
    except (Unavailable, AttributeError, OSError) as error:
        logger.warning("weight sync: buckets are moved by Python, slower: %s", error)
        return None, str(error)
    pointer, i64, u64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
    library.pump_send.argtypes = [ctypes.c_int, pointer, pointer, u64, pointer, i64, pointer, pointer]
    library.pump_receive.argtypes = [ctypes.c_int, pointer, pointer, u64, pointer, i64, pointer, pointer]
    library.pump_announce.argtypes = [pointer, ctypes.c_int, pointer, pointer, u64, u64, u64]
    library.pump_collect.argtypes = [pointer, ctypes.c_int, pointer, u64, u64, pointer]
    library.pump_mark.argtypes, library.pump_mark.restype = [pointer, u64, u64], None
    library.pump_gather.argtypes = [pointer, pointer, u64, pointer]
    library.pump_gather.restype = u64
    return library, "compiled"


@functools.cache
def _hash_functions() -> ctypes.CDLL:
    """xxh3 as C functions, from the file of the Python package (AttributeError: it exports none)."""
    library = ctypes.CDLL(xxhash._xxhash.__file__)  # type: ignore[attr-defined]
    for name in ("XXH3_createState", "XXH3_freeState", "XXH3_64bits_reset", "XXH3_64bits_update", "XXH3_64bits_digest"):
        getattr(library, name)
    library.XXH3_createState.restype = ctypes.c_void_p
    library.XXH3_freeState.argtypes = [ctypes.c_void_p]
    return library


class Damaged(SyncError):
    """A bucket's bytes are not what its checksum says; ``bucket`` is its number."""

    bucket = -1


def refuse(code: int, progress: Progress, peer: str) -> NoReturn:
    """Raise what is wrong with the bucket at which a loop stopped."""
    kind = Damaged if code == DAMAGED else BadFrame
    error = kind(f"bucket {progress.bucket} {REASONS[code]}", phase="buckets", peer=peer)
    if isinstance(error, Damaged):
        error.bucket = progress.bucket
    raise error


class Hasher:
    """A state of xxh3 for one thread."""

    def __init__(self) -> None:
        self._library = _hash_functions()
        address = {
            name: ctypes.cast(getattr(self._library, f"XXH3_64bits_{name}"), ctypes.c_void_p).value
            for name in ("reset", "update", "digest")
        }
        self._state = self._library.XXH3_createState()
        self.api = _Hash(self._state, **address)

    def __del__(self) -> None:
        self._library.XXH3_freeState(self._state)


class Layout:
    """Where each bucket's bytes lie, for the loops, and which buckets are known.

    Args:
        manifest: whole.
        views: the bytes of each tensor; all plain.
        sending: whether the bytes are read.
    """

    def __init__(self, manifest: Manifest, views: Sequence[memoryview | None], *, sending: bool) -> None:
        self.num_buckets = manifest.num_buckets
        gap = _GAP if sending else _WASTE
        address = [ctypes.addressof(ctypes.c_ubyte.from_buffer(v)) if v else 0 for v in views]
        first, parts = [0], []
        for bucket in range(manifest.num_buckets):
            at = 0
            for piece in manifest.pieces(bucket):
                if piece.offset > at:
                    parts += [ctypes.addressof(gap), piece.offset - at]
                parts += [address[piece.tensor] + piece.start, piece.size]
                at = piece.offset + piece.size
            rest = manifest.bucket_size(bucket) - at
            if rest:
                parts += [ctypes.addressof(gap), rest]
            first.append(len(parts) // 2)
        self._first = torch.tensor(first, dtype=torch.int64)
        self._parts = torch.tensor(parts, dtype=torch.int64)
        self._checksums = torch.zeros(max(self.num_buckets, 1), dtype=torch.int64)
        self._state = torch.zeros(max(self.num_buckets, 1), dtype=torch.uint8)
        numbers = (manifest.num_buckets, manifest.bucket_bytes, manifest.num_bytes)
        tensors = (self._first, self._parts, self._checksums, self._state)
        self.struct = _Layout(*numbers, *(tensor.data_ptr() for tensor in tensors))

    def size(self, bucket: int) -> int:
        """Bytes of one bucket."""
        return min(self.struct.bucket_bytes, self.struct.num_bytes - bucket * self.struct.bucket_bytes)

    def reset(self) -> None:
        """No bucket is known."""
        self._state.zero_()
        self.struct.missing = self.num_buckets

    @property
    def missing(self) -> int:
        """How many buckets have not been moved; only a receiver's loops count."""
        return self.struct.missing

    def is_known(self, bucket: int) -> bool:
        """Whether the bucket has been moved, or is on its way."""
        return 0 <= bucket < self.num_buckets and bool(self._state[bucket])

    def known(self) -> list[int]:
        """The buckets that have been moved, in order."""
        return (self._state == 2).nonzero().flatten().tolist()

    def mark(self, bucket: int, checksum: int) -> None:
        """A bucket has been moved by Python."""
        library = kernel()[0]
        assert library is not None
        library.pump_mark(ctypes.byref(self.struct), bucket, checksum)

    def digest_bytes(self, rank: int, num_ranks: int) -> bytes:
        """The checksums of a rank's buckets in order, little endian."""
        mine = self._checksums[: self.num_buckets][rank::num_ranks].contiguous()
        return bytes(memory.view(mine))


def send(
    fd: int, hasher: Hasher, layout: Layout, sync: int, index: Any, count: int, at: Any, progress: Progress
) -> int:
    """Send the buckets whose numbers stand in ``index``, an array of uint64, from ``at`` on.

    Returns:
        DONE, TICK (nothing moved for a while: call again, or give up), or an errno.
    """
    library = kernel()[0]
    assert library is not None
    ref = ctypes.byref
    return library.pump_send(fd, ref(hasher.api), ref(layout.struct), sync, index, count, ref(at), ref(progress))


def receive(
    fd: int,
    hasher: Hasher,
    layout: Layout,
    sync: int,
    ring: tuple[int, int, int],
    most: int,
    got: Any,
    progress: Progress,
) -> int:
    """Receive up to ``most`` buckets of ``sync``, verified, into ``layout``.

    Args:
        ring: address, bytes of a slot and number of slots of the ring that the connection has, or zeros.

    Returns:
        DONE, an errno, or why it stopped; after STRANGE the frame's header is in ``progress``.
    """
    library = kernel()[0]
    assert library is not None
    ref = ctypes.byref
    return library.pump_receive(
        fd, ref(hasher.api), ref(layout.struct), sync, ref(_Ring(*ring)), most, ref(got), ref(progress)
    )


def gather(hasher: Hasher, layout: Layout, bucket: int, to: memoryview) -> int:
    """Copy a bucket's parts into one piece of memory; their checksum."""
    library = kernel()[0]
    assert library is not None
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(to))
    return library.pump_gather(ctypes.byref(hasher.api), ctypes.byref(layout.struct), bucket, address)


def announce(fds: Any, hasher: Hasher, layout: Layout, sync: int, bucket: int, slot: int) -> int:
    """Tell the readers at the sockets ``fds``, an array of int, that a slot holds a bucket; DONE or an errno."""
    library = kernel()[0]
    assert library is not None
    ref = ctypes.byref
    return library.pump_announce(fds, len(fds), ref(hasher.api), ref(layout.struct), sync, bucket, slot)


def collect(fds: Any, hasher: Hasher, sync: int, slot: int, progress: Progress) -> int:
    """Wait until the readers at ``fds`` have released a slot; ``progress.bucket`` counts them.

    Returns:
        DONE, TICK, CLOSED, STRANGE (another frame came), or an errno; all but DONE at reader ``progress.bucket``.
    """
    library = kernel()[0]
    assert library is not None
    return library.pump_collect(fds, len(fds), ctypes.byref(hasher.api), sync, slot, ctypes.byref(progress))
