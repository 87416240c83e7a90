"""Compiles the simulated device for the installed torch on first use: about half a minute, once a torch version."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

from verl_fl._errors import explain

_NAME = "_verl_fl_simulated"
_SOURCES = sorted((Path(__file__).parent / "csrc").glob("*.cpp"))
_FLAGS = ("-std=c++20", "-O0", "-fPIC", f"-DTORCH_EXTENSION_NAME={_NAME}")


@functools.cache
def extension() -> ModuleType:
    """The compiled module; loading it makes torch know the device.

    Raises:
        RuntimeError: there is no C++ compiler, or it refuses the sources; with its message.
    """
    path = _folder() / f"{_NAME}-{_key()}.so"
    if not path.exists():
        _compile(path)
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        raise RuntimeError(
            explain(
                "a simulated device needs a C++ compiler, once",
                asked=f"CXX={os.environ.get('CXX')!r}" if os.environ.get("CXX") else "c++",
                found="no such program on PATH",
                fix="install one (apt install g++), or set CXX to it",
            )
        )
    print(f"verl-fl: compiling the simulated device for torch {torch.__version__} (once)", file=sys.stderr)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [f"{folder}/{source.stem}.o" for source in _SOURCES]
        with ThreadPoolExecutor(2) as pool:
            commands = [
                [compiler, *_FLAGS, *_includes(), "-c", str(source), "-o", made]
                for source, made in zip(_SOURCES, objects, strict=True)
            ]
            list(pool.map(_run, commands))
        libraries = Path(torch.__file__).parent / "lib"
        names = ("torch", "torch_cpu", "torch_python", "c10")
        linked = f"{folder}/linked.so"
        _run([compiler, "-shared", *objects, f"-L{libraries}", *(f"-l{name}" for name in names), "-o", linked])
        os.replace(linked, path)  # whole or not at all, whoever else compiles at the same time


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if result.returncode != 0:
        raise RuntimeError(
            explain(
                "the simulated device does not compile",
                asked=" ".join(command),
                found=result.stderr[-2000:],
                fix="use a compiler with C++20 (g++ 11 or newer) and a torch between 2.7 and 2.14",
            )
        )


def _includes() -> list[str]:
    headers = Path(torch.__file__).parent / "include"
    folders = (headers, headers / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"])
    return [f"-I{folder}" for folder in folders]


def _key() -> str:
    headers = (Path(__file__).parent / "csrc").glob("*.h")
    texts = [path.read_text() for path in (*_SOURCES, *sorted(headers))]
    parts = (*texts, *_FLAGS, torch.__version__, sys.version, os.environ.get("CXX", ""))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl_fl"
