"""The lossless delta codec: what changed between two versions of a piece of weights, in as few bytes as it takes.

A piece is n bytes, n = e * w: e elements of w bytes each (w: 1, 2, 4 or 8), whose bits are all that counts: NaNs, -0.0
and subnormals arrive as they left. An encoded change is a number (the encoding), a payload, and from the receiver's
side e and w. Everything is little endian. The encoder takes the encoding with the smallest payload, of equal ones the
lowest number; c elements changed.

==  ======  ==============================================================================================
0   SAME    0 bytes. Only where nothing changed.
1   FULL    n bytes: the new piece.
2   LIST    c * (4 + w) bytes: c ascending uint32 element indices, then the c new elements in that order.
3   BITMAP  ceil(e / 8) + c * w bytes: bit i % 8 (least significant first) of byte i // 8 is 1 where element
            i changed, bits beyond the last element are 0; then the c new elements, ascending.
4   STEPS   one token for each changed element, ascending; see below.
==  ======  ==============================================================================================

STEPS is made for what training does: few elements change, most by one unit in the last place, which is 1 when the
element's bits are read as an integer. A token says how many unchanged elements lie before its element (the gap, counted
from the element after the last token's, at first from element 0) and what happens to it: a step, added to the element
as an integer modulo 2 ** (8 * w), or its new value. b is the token's first byte.

=========  =======  ================================  ========================================================
b          length   gap                               change
=========  =======  ================================  ========================================================
0 - 223    1        b >> 1: 0 - 111                   + 1 where b is even, - 1 where it is odd
224 - 251  2        112 + 256 * ((b - 224) >> 1)      + 1 where b is even, - 1 where it is odd
                    + second byte: 112 - 3695
252        3        uint8                             + int8
253        2 + w    uint8                             w bytes: the new element
254        6        uint32                            + int8
255        5 + w    uint32                            w bytes: the new element
=========  =======  ================================  ========================================================

The encoder is canonical. A step is new - old modulo 2 ** (8 * w), read as signed. Steps of + 1 and - 1 with a gap below
3696 are a token of one or two bytes, other steps in -128 to 127 are 252 or 254, all else is 253 or 255; 252 and 253
where the gap is below 256. The decoder takes every token that stays inside the piece.

The inner loops are ``delta.c``, compiled on first use; without a C compiler torch's operators make the same bytes.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from pathlib import Path

import torch

from verl_fl._compile import Unavailable, load

logger = logging.getLogger("verl_fl.weight_sync")

SAME, FULL, LIST, BITMAP, STEPS = range(5)
NAMES = ("SAME", "FULL", "LIST", "BITMAP", "STEPS")

_SOURCE = Path(__file__).with_name("delta.c")
_FLAGS = ("-O3", "-march=native")
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MEDIUM, _STEP, _VALUE, _FAR_STEP, _FAR_VALUE = 224, 252, 253, 254, 255
_SHORT_GAPS, _MEDIUM_GAPS = 112, 3696
_MAX_ELEMENTS = 1 << 32
_REASONS = (
    "nothing",
    "unknown encoding",
    "wrong size",
    "indices not ascending",
    "element out of range",
    "padding bits set",
    "truncated token",
)
"""By the numbers that ``delta.c`` gives them."""
_BAD_SIZE, _BAD_ORDER, _BAD_INDEX, _BAD_PADDING, _TRUNCATED = range(2, 7)

_Result = ctypes.c_int64 * 2
_lock = threading.Lock()
_chosen: tuple[ctypes.CDLL | None, str] | None = None
"""The library, or None for torch, and the reason; None before the first call. Tests set it."""


def bound(n: int) -> int:
    """Bytes that ``encode`` needs in ``out`` for a piece of ``n`` bytes: one result and the encoder's own notes."""
    return n + 16 + 8 * (-(-n // 64))


def encode(new: torch.Tensor, old: torch.Tensor, itemsize: int, out: torch.Tensor) -> tuple[int, int, int]:
    """Write the smallest encoding of the change from ``old`` to ``new`` into ``out``; ``old`` then equals ``new``.

    All are contiguous uint8 tensors in host memory that share no byte; ``new`` and ``old`` are equally long, at most
    2**32 elements of ``itemsize`` bytes, ``out`` has ``bound(n)`` bytes. May run in many threads at once, and the C
    kernel lets Python's other threads run.

    Returns:
        The encoding, the payload's size (it is ``out[:size]``, what follows is undefined), and how many elements'
        bits changed.
    """
    n = new.numel()
    _check(new, n, itemsize)
    _check(old, n, itemsize)
    if old.numel() != n or out.numel() < bound(n) or n // itemsize > _MAX_ELEMENTS:
        raise ValueError(f"encode got {n} new and {old.numel()} old bytes, and {out.numel()} for the {bound(n)} of out")
    _check(out, 0, 1)
    library = (_chosen or _choose())[0]
    if library is None:
        return _encode(new, old, itemsize, out)
    result = _Result()
    changed = library.delta_encode(new.data_ptr(), old.data_ptr(), n, itemsize, out.data_ptr(), result)
    return result[0], result[1], changed


def apply(target: torch.Tensor, payload: torch.Tensor, encoding: int, itemsize: int) -> int:
    """Turn the old piece in ``target`` into the new one, in place; both are contiguous uint8 tensors in host memory.

    No payload, however wrong, makes it read or write outside the two tensors.

    Returns:
        How many elements the payload sets; for FULL, how many of them differed.

    Raises:
        ValueError: the payload is malformed. ``target`` may then be half changed.
    """
    n, size = target.numel(), payload.numel()
    _check(target, n, itemsize)
    _check(payload, 0, 1)
    if encoding not in (SAME, FULL, LIST, BITMAP, STEPS):
        raise ValueError(f"malformed weight delta: encoding {encoding!r} is none of 0 to {STEPS}")
    library = (_chosen or _choose())[0]
    if library is None:
        return _apply(target, payload, encoding, itemsize)
    changed = library.delta_apply(target.data_ptr(), n, itemsize, payload.data_ptr(), size, encoding)
    if changed < 0:
        raise _malformed(-changed % 16, -changed // 16, encoding, n, size)
    return changed


def kernel() -> str:
    """Which implementation runs, ``C`` or ``torch``, and why."""
    return (_chosen or _choose())[1]


def _choose() -> tuple[ctypes.CDLL | None, str]:
    global _chosen
    with _lock:
        if _chosen is None:
            try:
                _chosen = _load(), "C: compiled for this processor"
            except Unavailable as reason:
                _chosen = None, f"torch: {reason}"
                logger.warning("weight_sync: deltas are encoded by torch's operators, many times slower: %s", reason)
        return _chosen


def _load(*more_flags: str) -> ctypes.CDLL:
    library = load(_SOURCE, (*_FLAGS, *more_flags))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.delta_encode.argtypes = (pointer, pointer, number, number, pointer, _Result)
    library.delta_apply.argtypes = (pointer, number, number, pointer, number, number)
    library.delta_encode.restype = library.delta_apply.restype = number
    return library


def _check(tensor: torch.Tensor, n: int, itemsize: int) -> None:
    """C trusts the addresses that it is given, so this is not an assertion."""
    if tensor.dtype is not torch.uint8 or not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError(f"the delta codec takes contiguous uint8 CPU tensors, got {tensor.dtype} on {tensor.device}")
    if itemsize not in _INTEGER or n % itemsize:
        raise ValueError(f"{n} bytes are not elements of {itemsize!r} bytes; an element has 1, 2, 4 or 8")


def _malformed(reason: int, at: int, encoding: int, n: int, size: int) -> ValueError:
    where = f"byte {at} of a {NAMES[encoding]} payload of {size} bytes for a piece of {n}"
    return ValueError(f"malformed weight delta: {_REASONS[reason]} at {where}")


def _elements(piece: torch.Tensor, itemsize: int) -> torch.Tensor:
    """The bytes as integers: the same memory where torch can view it so, else a copy."""
    aligned = piece if piece.storage_offset() % itemsize == 0 else piece.clone()
    return aligned.view(_INTEGER[itemsize])


def _bytes(values: torch.Tensor, width: int) -> torch.Tensor:
    """Integers as ``width`` bytes each, one row a value."""
    return values.to(_INTEGER[width]).view(-1, 1).view(torch.uint8)


def _number(payload: torch.Tensor, at: torch.Tensor, width: int) -> torch.Tensor:
    """The unsigned integers (signed at 8 bytes) of ``width`` bytes that start at each of the offsets."""
    digits = payload[at[:, None] + torch.arange(width)].long()
    return (digits << (8 * torch.arange(width))).sum(1)


def _encode(piece: torch.Tensor, old_piece: torch.Tensor, itemsize: int, out: torch.Tensor) -> tuple[int, int, int]:
    new, old = _elements(piece, itemsize), _elements(old_piece, itemsize)
    differs = new != old
    indices = differs.nonzero().flatten()
    changed = indices.numel()
    if changed == 0:
        return SAME, 0, 0
    values = new[indices]
    gaps = indices.diff(prepend=indices.new_full((1,), -1)) - 1
    steps = (values - old[indices]).long()
    lengths, first = _tokens(gaps, steps, itemsize)
    bitmap_size = -(-new.numel() // 8)
    sizes = {
        FULL: piece.numel(),
        LIST: changed * (4 + itemsize),
        BITMAP: bitmap_size + changed * itemsize,
        STEPS: int(lengths.sum()),
    }
    encoding = min(sizes, key=lambda encoding: (sizes[encoding], encoding))
    payload = out[: sizes[encoding]]
    if encoding == FULL:
        payload.copy_(piece)
    elif encoding == LIST:
        payload[: 4 * changed] = _bytes(indices, 4).flatten()
        payload[4 * changed :] = values.view(torch.uint8)
    elif encoding == BITMAP:
        bits = torch.zeros(bitmap_size * 8, dtype=torch.uint8)
        bits[: new.numel()] = differs
        payload[:bitmap_size] = (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
        payload[bitmap_size:] = values.view(torch.uint8)
    else:
        _write_tokens(payload, lengths, first, gaps, steps, values, itemsize)
    old_piece.copy_(piece)
    return encoding, sizes[encoding], changed


def _tokens(gaps: torch.Tensor, steps: torch.Tensor, itemsize: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's length and first byte."""
    far, is_value = (gaps > 255).long(), ((steps < -128) | (steps > 127)).long()
    lengths = torch.where(is_value > 0, 2 + itemsize, 3) + 3 * far
    first = _STEP + 2 * far + is_value
    down = (steps < 0).long()
    unit = (steps == 1) | (steps == -1)
    medium, short = unit & (gaps < _MEDIUM_GAPS), unit & (gaps < _SHORT_GAPS)
    lengths = torch.where(short, 1, torch.where(medium, 2, lengths))
    first = torch.where(medium, _MEDIUM + 2 * ((gaps - _SHORT_GAPS) >> 8) + down, first)
    return lengths, torch.where(short, 2 * gaps + down, first)


def _write_tokens(
    payload: torch.Tensor,
    lengths: torch.Tensor,
    first: torch.Tensor,
    gaps: torch.Tensor,
    steps: torch.Tensor,
    values: torch.Tensor,
    itemsize: int,
) -> None:
    starts = lengths.cumsum(0) - lengths
    payload[starts] = first.to(torch.uint8)

    def put(tokens: torch.Tensor, offset: int, numbers: torch.Tensor, width: int) -> None:
        payload[starts[tokens][:, None] + offset + torch.arange(width)] = _bytes(numbers[tokens], width)

    put((first >= _MEDIUM) & (first < _STEP), 1, (gaps - _SHORT_GAPS) & 255, 1)
    for kind, width in ((_STEP, 1), (_VALUE, 1), (_FAR_STEP, 4), (_FAR_VALUE, 4)):
        tokens = first == kind
        put(tokens, 1, gaps, width)
        put(tokens, 1 + width, *((values, itemsize) if kind & 1 else (steps, 1)))


def _apply(target: torch.Tensor, payload: torch.Tensor, encoding: int, itemsize: int) -> int:
    elements = _elements(target, itemsize)
    n, size = target.numel(), payload.numel()
    if encoding == SAME:
        if size:
            raise _malformed(_BAD_SIZE, size, encoding, n, size)
        return 0
    if encoding == FULL:
        if size != n:
            raise _malformed(_BAD_SIZE, size, encoding, n, size)
        indices, values = torch.arange(elements.numel()), _elements(payload, itemsize)
        changed = int((values != elements).sum())
    elif encoding == LIST:
        indices, values = _read_list(payload, n, itemsize)
        changed = indices.numel()
    elif encoding == BITMAP:
        indices, values = _read_bitmap(payload, n, itemsize)
        changed = indices.numel()
    else:
        indices, values = _read_steps(elements, payload, itemsize)
        changed = indices.numel()
    elements[indices] = values
    if elements.data_ptr() != target.data_ptr():
        target.copy_(elements.view(torch.uint8))
    return changed


def _read_list(payload: torch.Tensor, n: int, itemsize: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = payload.numel()
    if size % (4 + itemsize):
        raise _malformed(_BAD_SIZE, size, LIST, n, size)
    count = size // (4 + itemsize)
    indices = _number(payload, 4 * torch.arange(count), 4)
    unordered = indices.diff(prepend=indices.new_full((1,), -1)) <= 0
    wrong = (unordered | (indices >= n // itemsize)).nonzero().flatten()
    if wrong.numel():
        at = int(wrong[0])
        raise _malformed(_BAD_ORDER if unordered[at] else _BAD_INDEX, 4 * at, LIST, n, size)
    return indices, _elements(payload[4 * count :], itemsize)


def _read_bitmap(payload: torch.Tensor, n: int, itemsize: int) -> tuple[torch.Tensor, torch.Tensor]:
    size, count = payload.numel(), n // itemsize
    length = -(-count // 8)
    if size < length:
        raise _malformed(_BAD_SIZE, size, BITMAP, n, size)
    bits = ((payload[:length, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()
    if bits[count:].any():
        raise _malformed(_BAD_PADDING, length - 1, BITMAP, n, size)
    indices = bits.nonzero().flatten()
    if size != length + itemsize * indices.numel():
        raise _malformed(_BAD_SIZE, size, BITMAP, n, size)
    return indices, _elements(payload[length:], itemsize)


def _read_steps(old: torch.Tensor, payload: torch.Tensor, itemsize: int) -> tuple[torch.Tensor, torch.Tensor]:
    n, size = old.numel() * itemsize, payload.numel()
    starts, truncated = _token_starts(payload, itemsize)
    first = payload[starts].long()
    medium, near, far = (first >= _MEDIUM) & (first < _STEP), (first >= _STEP) & (first < _FAR_STEP), first >= _FAR_STEP
    gaps = first >> 1
    gaps[medium] = _SHORT_GAPS + 256 * ((first[medium] - _MEDIUM) >> 1) + payload[starts[medium] + 1]
    gaps[near] = payload[starts[near] + 1].long()
    gaps[far] = _number(payload, starts[far] + 1, 4)
    indices = (gaps + 1).cumsum(0) - 1
    wrong = (indices >= old.numel()).nonzero().flatten()
    if wrong.numel():
        raise _malformed(_BAD_INDEX, int(starts[wrong[0]]), STEPS, n, size)
    if truncated is not None:
        raise _malformed(_TRUNCATED, truncated, STEPS, n, size)
    values = old[indices].long() + 1 - 2 * (first & 1)
    for kind, offset in ((_STEP, 2), (_VALUE, 2), (_FAR_STEP, 5), (_FAR_VALUE, 5)):
        tokens = first == kind
        at = starts[tokens] + offset
        step = payload[at].view(torch.int8).long() if not kind & 1 and at.numel() else 0
        values[tokens] = _number(payload, at, itemsize) if kind & 1 else old[indices[tokens]].long() + step
    return indices, values.to(old.dtype)


def _token_starts(payload: torch.Tensor, itemsize: int) -> tuple[torch.Tensor, int | None]:
    """Where each whole token starts, and where a truncated last one does.

    Only bytes from 224 up can start a token of more than one byte; which of them do is found by following all of them
    to their successors, in doubling strides.
    """
    size = payload.numel()
    long = (payload >= _MEDIUM).nonzero().flatten()
    lengths = torch.tensor([2] * (_STEP - _MEDIUM) + [3, 2 + itemsize, 6, 5 + itemsize])
    ends = long + lengths[payload[long].long() - _MEDIUM]
    jump = torch.cat([torch.searchsorted(long, ends), torch.tensor([long.numel()])])
    reached = torch.zeros(long.numel() + 1, dtype=torch.bool)
    reached[0] = True
    for _ in range(long.numel().bit_length()):
        reached[jump[reached]] = True
        jump = jump[jump]
    long, ends = long[reached[:-1]], ends[reached[:-1]]
    inside = torch.zeros(size + 1, dtype=torch.int8)
    inside[long + 1] += 1
    inside[ends.clamp(max=size)] -= 1
    starts = (inside[:-1].cumsum(0) == 0).nonzero().flatten()
    if long.numel() and ends[-1] > size:
        return starts[:-1], int(long[-1])
    return starts, None
