"""The audit: every place in verl that names one vendor, and what each does on another vendor's machine.

A place is one name, string or import in verl's code; comments and docstrings are none. ``verdicts.json`` holds the
judgement of each, keyed so that a line that only moves keeps it, and one that is new or has changed has none.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERDICTS = ("routed", "harmless", "open")
DATA = Path(__file__).with_name("verdicts.json")

_WORDS = {
    "nccl": re.compile("nccl", re.I),
    "is_*_available": re.compile(r"is_(torch_)?(cuda|npu)_available"),
    "visibility mask": re.compile(r"[A-Z]_VISIBLE_DEVICES"),
    "num_gpus": re.compile("^num_gpus$"),
    "pynvml": re.compile("pynvml|nvidia.smi"),
    "cupy": re.compile("cupy"),
    "nvtx": re.compile("nvtx"),
    "mem_get_info": re.compile("mem_get_info"),
}
"""Kinds that count in a name as in a string."""

_STRINGS = {
    '"cuda"': re.compile(r"\bcuda\b"),
    '"npu"': re.compile(r"^npu$"),
    '"GPU"': re.compile("^GPU$"),
    "flash_attn": re.compile(r"\bflash_attn\b"),
    "flash_attention": re.compile("flash_attention"),
}
"""Kinds that count only in a string."""

_IMPORTS = {"flash_attn": re.compile("^flash_attn"), "torch.cuda": re.compile(r"^torch\.cuda\b")}
"""Kinds that count only in an import."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One vendor-specific place in verl."""

    file: str
    """Relative to the package, with slashes."""

    scope: str
    """The enclosing classes and functions, with dots; empty at module level."""

    kind: str
    """What was found, such as ``torch.cuda``."""

    text: str
    """Its source line without indentation."""

    line: int = field(compare=False)
    """Its line number, which is no part of the key."""

    @property
    def key(self) -> str:
        """What a judgement refers to within its file."""
        return f"{self.scope or '<module>'} | {self.kind} | {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What one or more places of one file do on another vendor's machine."""

    file: str
    """The file of verl, relative to the package."""

    verdict: str
    """``routed`` through the platform, ``harmless``, or ``open``."""

    why: str
    """By what it is routed, why it is harmless, or what breaks and for whom."""

    by: tuple[str, ...] = ()
    """The ledger's patches, or ``Platform.method``, that route it."""

    places: tuple[str, ...]
    """The keys of the places, one for each time a key occurs."""


@dataclass(frozen=True, slots=True)
class Audit:
    """A scan set against the judgements."""

    judged: list[tuple[Place, Judgement]]
    """Every place that has a judgement."""

    unjudged: list[Place]
    """Places that nobody has judged: new in this verl, or changed."""

    stale: list[tuple[str, str]]
    """``(file, key)`` of judgements whose place is gone."""

    @property
    def complete(self) -> bool:
        """Whether every place is judged and every judgement has its place."""
        return not self.unjudged and not self.stale

    def counts(self) -> dict[str, int]:
        """Places by verdict, the unjudged ones too."""
        found = Counter(judgement.verdict for _, judgement in self.judged)
        return {verdict: found[verdict] for verdict in VERDICTS} | {"unjudged": len(self.unjudged)}


def run(package: Path | None = None) -> Audit:
    """Audit ``package``, by default the installed verl, which is not imported."""
    return compare(scan(package or installed()), load())


def installed() -> Path:
    """The folder of the installed verl.

    Raises:
        RuntimeError: there is none.
    """
    from importlib.util import find_spec

    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("verl is not installed, so there is nothing to audit")
    return Path(next(iter(spec.submodule_search_locations)))


def load(path: Path = DATA) -> list[Judgement]:
    """The judgements, checked.

    Raises:
        ValueError: a verdict that does not exist, or a reason that is missing.
    """
    judgements = []
    for entry in json.loads(path.read_text()):
        entry = {**entry, "by": tuple(entry.get("by", ())), "places": tuple(entry["places"])}
        judgement = Judgement(**entry)
        if judgement.verdict not in VERDICTS or not judgement.why:
            raise ValueError(f"{path.name}: {judgement.file}: a judgement needs a reason and one of {VERDICTS}")
        judgements.append(judgement)
    return judgements


def compare(places: list[Place], judgements: list[Judgement]) -> Audit:
    """Give each place its judgement; each named key serves one place."""
    waiting: dict[tuple[str, str], list[Judgement]] = {}
    for judgement in judgements:
        for key in judgement.places:
            waiting.setdefault((judgement.file, key), []).append(judgement)
    audit = Audit([], [], [])
    for place in places:
        if found := waiting.get((place.file, place.key)):
            audit.judged.append((place, found.pop(0)))
        else:
            audit.unjudged.append(place)
    audit.stale.extend(sorted(name for name, left in waiting.items() for _ in left))
    return audit


def scan(package: Path) -> list[Place]:
    """Every place in ``package``, by file and line."""
    places: list[Place] = []
    for path in sorted(package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        name = path.relative_to(package).as_posix()
        lines = source.splitlines()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # verl's own escapes are not our concern
            tree = ast.parse(source)
        for scope, line, node in _walk(tree, "", None):
            text = " ".join(lines[line - 1].split())
            places.extend(Place(name, scope, kind, text, line) for kind in _kinds(node))
    return sorted(places, key=lambda place: (place.file, place.line, place.kind))


def _walk(node: ast.AST, scope: str, fixed: int | None) -> Iterator[tuple[str, int, Any]]:
    """Every node with the scope around it and its line; strings that stand for themselves are left out.

    What is inside an f-string has the line of the whole: Python versions differ in where they see its parts.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue  # a docstring, or what documents an attribute
        inner = scope
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{scope}.{child.name}" if scope else child.name
        line = fixed or getattr(child, "lineno", None)
        if line is not None:
            yield scope, line, child
        yield from _walk(child, inner, line if isinstance(child, ast.JoinedStr) else fixed)


def _kinds(node: Any) -> set[str]:
    """The kinds of place that this node itself is."""
    if isinstance(node, ast.Constant):
        return _matches(node.value, {**_WORDS, **_STRINGS}) if isinstance(node.value, str) else set()
    if isinstance(node, ast.Attribute):
        direct = node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch"
        return _matches(node.attr, _WORDS) | ({"torch.cuda"} if direct else set())
    if isinstance(node, ast.Call):
        moved = isinstance(node.func, ast.Attribute) and node.func.attr == "cuda"
        return {".cuda()"} if moved else set()
    if isinstance(node, ast.ImportFrom):
        direct = node.module == "torch" and any(alias.name == "cuda" for alias in node.names)
        return _matches(node.module or "", _IMPORTS | _WORDS) | ({"torch.cuda"} if direct else set())
    if isinstance(node, ast.alias):
        return _matches(node.name, _IMPORTS | _WORDS)
    name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "name", None)
    return _matches(name, _WORDS) if isinstance(name, str) else set()


def _matches(text: str, kinds: dict[str, re.Pattern[str]]) -> set[str]:
    return {kind for kind, pattern in kinds.items() if pattern.search(text)}
