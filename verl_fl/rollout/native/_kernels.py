"""The functions of ``kernels.c``, compiled for this machine's processor on first use, called on tensors.

Without a C compiler the engine runs on torch's operators alone.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch

from verl_fl._compile import Unavailable, load

logger = logging.getLogger("verl_fl.rollout")

_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-O3", "-march=native", "-ffast-math", "-fopenmp")
_TYPES = {torch.bfloat16: "bf16", torch.float32: "float"}


class Kernels:
    """The compiled functions for one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        suffix = _TYPES[dtype]
        self._functions = {
            name: getattr(library, f"{name}_{suffix}") for name in ("rms_norm", "rotate_and_store", "attend")
        }

    def call(self, name: str, *arguments: torch.Tensor | int | float | None) -> None:
        """Call by name. Tensors must be contiguous CPU tensors; the C side states the shapes and checks none."""
        self._functions[name](*map(_argument, arguments))


def _argument(value: torch.Tensor | int | float | None) -> Any:
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous() and value.device.type == "cpu"
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_void_p(None) if value is None else ctypes.c_int64(value)


def kernels(dtype: torch.dtype) -> Kernels | None:
    """The kernels for ``dtype``; None, with the reason logged once, where they can't be had."""
    library = _library()
    return Kernels(library, dtype) if library is not None and dtype in _TYPES else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        # torch's own OpenMP, not a second one: two pools would spin against each other for the same cores.
        return load(_SOURCE, _FLAGS, link=_openmp())
    except Unavailable as reason:
        logger.warning("rollout: the C kernels are not used, decoding runs on torch's operators, slower: %s", reason)
        return None


def _openmp() -> tuple[str]:
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return (str(bundled[0]) if bundled else "-lgomp",)
