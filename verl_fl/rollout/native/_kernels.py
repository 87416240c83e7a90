"""Compiles ``kernels.c`` for this machine's processor on first use, and calls it on tensors.

Under a second, once a processor and version; without a C compiler the engine runs on torch's operators alone.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("verl_fl.rollout")

_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC")
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
    compiler = shutil.which((os.environ.get("CC") or "cc").split()[-1])
    if compiler is None:
        logger.warning("rollout: no C compiler (cc), so decoding runs on torch's operators alone, slower")
        return None
    try:
        path = _cache_folder() / f"kernels-{_key(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("rollout: the C kernels are not used, decoding is slower: %s", detail)
        return None


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, linked = f"{folder}/kernels.o", f"{folder}/kernels.so"
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True, timeout=120)
        run([compiler, *_FLAGS, "-c", str(_SOURCE), "-o", made])
        # torch's own OpenMP, not a second one: two pools would spin against each other for the same cores.
        run([compiler, "-shared", made, *_openmp(), "-o", linked])
        os.replace(linked, path)  # whole or not at all, whoever else compiles at the same time


def _openmp() -> list[str]:
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(bundled[0])] if bundled else ["-lgomp"]


def _key(compiler: str) -> str:
    """Differs where the compiled file would: source, flags, compiler, torch's OpenMP, processor."""
    processor = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            processor = next((line for line in lines if line.lower().startswith(("flags", "features"))), processor)
    parts = (_SOURCE.read_text(), *_FLAGS, compiler, *_openmp(), torch.__version__, processor)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl_fl"
