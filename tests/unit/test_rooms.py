"""The walls of the house: what may import what, and who may name a vendor."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "verl_fl"
FILES = sorted(ROOT.rglob("*.py"))
VENDOR = re.compile(r"\b(cuda|nccl|npu|hccl|ascend|musa|mccl|metax|maca|rocm|hip|xpu|mlu|cncl|nvidia|huawei)\b", re.I)


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, verl_fl; print([m for m in ('torch', 'ray', 'verl', 'vllm', 'transformers') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("path", sorted((ROOT / "platform").glob("*.py")), ids=lambda path: path.name)
def test_platform_imports_torch_and_the_standard_library_only(path):
    third_party = imported_modules(path) - set(sys.stdlib_module_names) - {"torch", "verl_fl"}
    assert not third_party


BRIDGES = ("engine.py", "gloo_engine.py")


@pytest.mark.parametrize("path", sorted((ROOT / "weight_sync").glob("*.py")), ids=lambda path: path.name)
def test_weight_sync_needs_torch_and_xxhash_only_but_for_its_bridges_to_verl(path):
    third_party = imported_modules(path) - set(sys.stdlib_module_names) - {"torch", "xxhash", "verl_fl"}
    assert third_party == ({"ray", "verl"} if path.name in BRIDGES else set())


# The patches quote verl's own text, which names vendors; they hold no branch on one.
NAMELESS = [path for path in FILES if path.relative_to(ROOT).parts[0] not in ("platform", "patches")]


@pytest.mark.parametrize("path", NAMELESS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_only_the_platform_room_names_a_vendor(path):
    docstrings = {
        node.body[0].value.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and ast.get_docstring(node)
    }
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    named = [
        (token.start[0], token.string)
        for token in tokens
        if token.type in (tokenize.NAME, tokenize.STRING)
        and token.start[0] not in docstrings
        and VENDOR.search(token.string)
    ]
    assert not named


def test_the_ledger_imports_no_verl():
    code = "import sys, verl_fl.patches; print([m for m in ('verl', 'torch', 'ray') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
