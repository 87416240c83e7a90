"""Tensors as plain memory: views of their bytes, the parts of a bucket, checksums."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import xxhash

from verl_fl.weight_sync.manifest import ALIGN, Manifest

_ZEROS = bytearray(ALIGN)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes lie in host memory in one run, in order."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous():
        return False
    return not tensor.is_neg() and not (tensor.is_complex() and tensor.is_conj())


def view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a plain tensor, writable; the tensor must outlive the view."""
    assert is_plain(tensor), "only plain tensors have a view"
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of any dtype and device as uint8 of one dim, sharing its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def parts_of(
    manifest: Manifest, bucket: int, views: Sequence[memoryview | None], gap: Any = _ZEROS
) -> list[memoryview]:
    """Where the bytes of a bucket lie, in order; the unused bytes between tensors come from (or go to) ``gap``.

    Args:
        views: the bytes of each tensor by its index in the manifest.
        gap: at least 64 bytes.
    """
    parts, at = [], 0
    for piece in manifest.pieces(bucket):
        if piece.offset > at:
            parts.append(memoryview(gap)[: piece.offset - at])
        view = views[piece.tensor]
        assert view is not None, "only tensors in host memory have parts"
        parts.append(view[piece.start : piece.start + piece.size])
        at = piece.offset + piece.size
    rest = manifest.bucket_size(bucket) - at
    if rest:
        parts.append(memoryview(gap)[:rest])
    return parts


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes between writable views of one size, without Python's lock."""
    if len(source):
        ctypes.memmove(_address(target), _address(source), len(source))


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


def checksum(parts: Iterable[Any]) -> int:
    """xxh3, 64 bits, of the parts one after another."""
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    return hasher.intdigest()
