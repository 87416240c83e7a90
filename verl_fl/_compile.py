"""Compiles one C file for this machine's processor on first use: under a second, once a version and a processor.

The result stays in ``~/.cache/verl_fl`` (or under XDG_CACHE_HOME). Imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path


class Unavailable(RuntimeError):
    """This machine gives no compiled code; the text says why and fits after a colon."""


def load(source: Path, flags: tuple[str, ...], link: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The shared library made from ``source``, compiled unless it lies in the cache.

    The compiler is ``cc``, or what the variable CC says. Any number of processes may ask at the same time.

    Args:
        flags: of the compiler; position-independent code is added.
        link: of the linker, after the object file.

    Raises:
        Unavailable: there is no compiler, it fails, or its result can't be kept or loaded.
    """
    compiler = shutil.which((os.environ.get("CC") or "cc").split()[-1])
    if compiler is None:
        raise Unavailable("no C compiler (cc)")
    flags = (*flags, "-fPIC")
    try:
        path = _cache_folder() / f"{source.stem}-{_key(source, compiler, *flags, *link)}.so"
        if not path.exists():
            _compile(compiler, source, flags, link, path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise Unavailable(str(getattr(error, "stderr", None) or error).strip()) from error


def _compile(compiler: str, source: Path, flags: tuple[str, ...], link: tuple[str, ...], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, linked = f"{folder}/made.o", f"{folder}/made.so"
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True, timeout=120)
        run([compiler, *flags, "-c", str(source), "-o", made])
        run([compiler, "-shared", made, *link, "-o", linked])
        os.replace(linked, path)  # whole or not at all, whoever else compiles at the same time


def _key(source: Path, *arguments: str) -> str:
    """Differs where the compiled file would: source, compiler, flags, what is linked, processor."""
    processor = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            processor = next((line for line in lines if line.lower().startswith(("flags", "features"))), processor)
    return hashlib.sha256("\0".join((source.read_text(), *arguments, processor)).encode()).hexdigest()[:20]


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl_fl"
