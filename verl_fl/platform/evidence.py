"""What a machine shows of its chips without an SDK: packages, torch's build, kernel drivers, the PCI bus.

Nothing here imports torch or a vendor's package, and no visibility mask changes any answer.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from pathlib import Path

ROOT = Path("/")
"""Where the system's files are; tests put a folder of theirs here."""

_DISPLAY, _ACCELERATOR = "0x03", "0x12"
"""PCI device classes of graphics cards and of processing accelerators; a network card of the same maker has another."""


def package(name: str) -> bool:
    """Whether the package is installed. A package that is loaded counts, whatever its metadata look like."""
    return name in sys.modules or package_file(name) is not None


def package_file(name: str) -> str | None:
    """The file that importing the package would run, or None. Nothing of it is run; its parents are."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a parent that is absent, or a stand-in without a spec
        return None
    return None if spec is None else spec.origin or ""


def device_nodes(pattern: str) -> list[str]:
    """The device files that match, such as ``dev/nvidia[0-9]*``."""
    return sorted(f"/{path.relative_to(ROOT)}" for path in ROOT.glob(pattern.lstrip("/"))) if pattern else []


def exists(path: str) -> bool:
    """Whether the system has this file or folder."""
    return (ROOT / path.lstrip("/")).exists()


def pci_devices(vendor: str) -> int:
    """Graphics cards and accelerators of this PCI vendor id, such as ``0x10de``."""
    found = 0
    for device in ROOT.glob("sys/bus/pci/devices/*"):
        try:
            kind = (device / "class").read_text().strip()
            found += (device / "vendor").read_text().strip() == vendor and kind[:4] in (_DISPLAY, _ACCELERATOR)
        except OSError:  # a device that went away while we looked
            continue
    return found if vendor else 0


@functools.cache
def torch_build() -> dict[str, str]:
    """What the installed torch was built for: ``version``, ``cuda``, ``hip``, ``xpu``; ``""`` for what it lacks.

    Read from its file and not from ``torch.version``, which some vendors' shims rewrite.
    """
    build = dict.fromkeys(("version", "cuda", "hip", "xpu"), "")
    try:
        tree = ast.parse(Path(package_file("torch") or "/").with_name("version.py").read_text())
    except (OSError, SyntaxError, ValueError):
        return build
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant) and node.value.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target.id.strip("_") for target in targets if isinstance(target, ast.Name)}
            build |= dict.fromkeys(names & build.keys(), str(node.value.value))
    return build


def torch_maker() -> str:
    """Whose chips this torch drives as its own: ``cuda``, ``rocm``, ``metax``, ``xpu``, or ``""``."""
    build = torch_build()
    if "metax" in build["version"] or "maca" in build["version"]:
        return "metax"
    return "rocm" if build["hip"] else "xpu" if build["xpu"] else "cuda" if build["cuda"] else ""
