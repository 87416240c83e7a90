"""FlagCX, the collective library that spans vendors: is it here, which version, and why not.

``USE_FLAGCX=1`` makes it the backend of every torch process group. Unset, a vendor's own library serves the groups of
that vendor, and FlagCX is kept for traffic between vendors.
"""

from __future__ import annotations

import importlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from verl_fl import _env
from verl_fl._errors import explain
from verl_fl.platform import evidence

_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagCX:
    """What :func:`find` found."""

    found: bool
    """Whether the library is here."""

    reason: str
    """Where it is, or why not."""

    library: str = ""
    """Path of ``libflagcx.so``."""

    api: str = ""
    """How its handle is made: ``devHandle`` since 0.13, ``handle`` before; ``""`` unknown. The calls differ."""

    version: str = ""
    """Of the Python package ``flagcx``; ``""`` where only the library is here."""

    package: bool = False
    """Whether torch's plugin, the package ``flagcx``, is installed: without it torch has no backend ``flagcx``."""


def requested() -> bool:
    """Whether ``USE_FLAGCX`` asks for it.

    Raises:
        ValueError: the variable is neither yes nor no.
    """
    text = _env.read(_env.USE_FLAGCX).lower()
    if text not in _YES + _NO:
        raise ValueError(
            explain(
                f"{_env.USE_FLAGCX} is a switch",
                asked=f"{_env.USE_FLAGCX}={os.environ[_env.USE_FLAGCX]!r}",
                legal="1, true, yes, on, 0, false, no, off",
                fix=f"set {_env.USE_FLAGCX}=1, or unset it",
            )
        )
    return text in _YES


def find() -> FlagCX:
    """Look for the library and torch's plugin; loads neither."""
    package = evidence.package("flagcx")
    places = _places()
    for place in places:
        library = place / "libflagcx.so"
        if library.is_file():
            try:
                api = _api(library)
            except OSError as error:
                return FlagCX(found=False, reason=f"{library} can't be read: {error.strerror}", package=package)
            file = str(library)
            return FlagCX(found=True, reason=file, library=file, api=api, version=_version(), package=package)
    looked = ", ".join(map(str, places)) or "nowhere"
    unset = "" if _env.read(_env.FLAGCX_PATH) else f"; {_env.FLAGCX_PATH} is not set"
    return FlagCX(found=False, reason=f"no libflagcx.so in {looked}{unset}", version=_version(), package=package)


def require(platform: str, adaptor: str) -> FlagCX:
    """Make torch know the backend ``flagcx``.

    Args:
        platform: who asks, for the message.
        adaptor: FlagCX's name for the chip; ``""``: it does not serve the chip.

    Raises:
        RuntimeError: it was asked for and can't be had; says why.
    """
    found = find()
    if problem := why_not(platform, adaptor, found):
        raise RuntimeError(problem)
    try:
        importlib.import_module("flagcx")
    except Exception as error:  # whatever its C extension raises
        problem = f"the package flagcx does not load: {type(error).__name__}: {error}"
        raise RuntimeError(_explained(platform, adaptor, problem)) from error
    return found


def why_not(platform: str, adaptor: str, found: FlagCX) -> str:
    """The message of :func:`require`, as far as it can be told without loading anything; ``""``: nothing is missing."""
    if not adaptor:
        return _explained(platform, adaptor, f"FlagCX has no adaptor for {platform}")
    if not found.found:
        return _explained(platform, adaptor, found.reason)
    if not found.package:
        return _explained(platform, adaptor, "torch's plugin, the Python package flagcx, is not installed")
    return ""


def _explained(platform: str, adaptor: str, problem: str) -> str:
    return explain(
        f"FlagCX can't be the collective library of {platform} here",
        asked=f"{_env.USE_FLAGCX}={os.environ.get(_env.USE_FLAGCX, '')}",
        found=problem,
        fix=(f"build FlagCX for {adaptor} and set {_env.FLAGCX_PATH} to it, or " if adaptor else "")
        + f"unset {_env.USE_FLAGCX} to use the vendor's own library",
    )


def _places() -> list[Path]:
    """Folders that may hold the library, what the user says first."""
    given = _env.read(_env.FLAGCX_PATH)
    roots = [Path(given)] if given else []
    places = [folder for root in roots for folder in (root, root / "lib", root / "build" / "lib")]
    if file := evidence.package_file("flagcx"):
        places += [Path(file).parent, Path(file).parent / "lib"]
    return places + [evidence.ROOT / "usr/local/lib"]


def _api(library: Path) -> str:
    """Told by the names the file exports, so that nothing has to be loaded."""
    with open(library, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return ""
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data.find(b"flagcxDeviceHandleInit") >= 0:
                return "devHandle"
            return "handle" if data.find(b"flagcxHandleInit") >= 0 else ""


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("flagcx")
    except PackageNotFoundError:
        return ""
