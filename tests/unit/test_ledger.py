"""The ledger: applied at import, once, undone whole, and loud when verl has moved."""

import re
import sys
import types

import pytest

from verl_fl.patches import LEDGER
from verl_fl.patches.ledger import Ledger


@pytest.fixture
def target(monkeypatch):
    """A module ``moved_verl`` that can be imported, with a function, a class and a static method."""
    module = types.ModuleType("moved_verl")

    class Base:
        def inherited(self):
            return "base"

    class Thing(Base):
        def method(self):
            return "stock"

        @staticmethod
        def static():
            return "static"

    module.Thing, module.function = Thing, lambda: "stock"
    monkeypatch.setitem(sys.modules, "moved_verl", module)
    return module


def make(target_name, replace):
    ledger = Ledger()
    ledger.patch(target=target_name, why="w", reference="r", remove_when="x")(replace)
    return ledger


def louder(original):
    def patched(*args):
        return original(*args) + "!"

    return patched


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("moved_verl:function", lambda m: m.function()),
        ("moved_verl:Thing.method", lambda m: m.Thing().method()),
        ("moved_verl:Thing.inherited", lambda m: m.Thing().inherited()),
    ],
)
def test_a_patch_is_applied_once_and_undone_whole(target, name, call):
    before = call(target)
    own = dict(vars(target.Thing))
    ledger = make(name, louder)
    ledger.install()
    ledger.install()
    assert call(target) == before + "!"
    assert ledger.state("louder") == "applied"
    ledger.undo()
    assert call(target) == before
    assert dict(vars(target.Thing)) == own
    ledger.reapply()
    assert call(target) == before + "!"
    ledger.undo()


def test_a_patch_waits_for_its_module():
    ledger = make("a_module_that_nobody_imports:function", louder)
    ledger.install()
    assert ledger.state("louder") == "pending"


def test_a_moved_target_is_an_error_that_names_verl(target):
    ledger = make("moved_verl:Thing.gone", louder)
    with pytest.raises(RuntimeError, match="does not find its target moved_verl:Thing.gone") as error:
        ledger.install()
    assert "verl 0.9" in str(error.value) and ">=0.9,<0.10" in str(error.value)


def test_two_patches_of_one_name_are_refused():
    ledger = make("m:f", louder)
    with pytest.raises(ValueError, match="stands in the ledger already"):
        ledger.patch(target="m:g", why="w", reference="r", remove_when="x")(louder)


def test_every_entry_says_why_where_and_until_when():
    assert len(LEDGER.patches) > 10
    for patch in LEDGER.patches.values():
        assert re.fullmatch(r"[\w.]+:[\w.]+", patch.target), patch.name
        assert len(patch.why) > 30 and len(patch.reference) > 5 and len(patch.remove_when) > 20, patch.name


@pytest.mark.parametrize("name", sorted(LEDGER.patches))
def test_every_target_exists_in_the_installed_verl(name):
    import importlib

    patch = LEDGER.patches[name]
    if patch.module.startswith("verl.workers.rollout.sglang_rollout"):
        pytest.importorskip("sglang", reason="the target's module imports sglang")
    import verl  # noqa: F401  loads the plugin, which installs the ledger

    importlib.import_module(patch.module)
    assert LEDGER.state(name) == "applied"
