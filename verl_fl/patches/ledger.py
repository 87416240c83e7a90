"""The ledger: every change to verl in memory, as data plus one function, applied when its target is imported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

from verl_fl._errors import explain

logger = logging.getLogger("verl_fl.patches")

_MISSING = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One change to one name of verl."""

    name: str
    """Unique, with dashes."""

    target: str
    """``module:attribute`` or ``module:Class.attribute``."""

    why: str
    """What goes wrong without it, in one or two sentences."""

    reference: str
    """The case, file and line, or link that shows the fault."""

    remove_when: str
    """The condition under which this entry is to be deleted."""

    replace: Callable[[Any], Any]
    """Takes the original, returns what stands in its place."""

    versions: str = ">=0.9,<0.10"
    """The verl versions it was written for."""

    @property
    def module(self) -> str:
        """The module whose import applies it."""
        return self.target.partition(":")[0]


class Ledger:
    """All patches, and which of them are in force in this process."""

    def __init__(self) -> None:
        self.patches: dict[str, Patch] = {}
        self._originals: dict[str, tuple[Any, str, Any]] = {}
        self._hooked: set[str] = set()

    def patch(self, *, target: str, why: str, reference: str, remove_when: str) -> Callable[[Callable], Callable]:
        """Decorate the function that makes the replacement; its name is the patch's."""

        def add(replace: Callable[[Any], Any]) -> Callable[[Any], Any]:
            name = replace.__name__.replace("_", "-")
            if name in self.patches:
                raise ValueError(f"patch {name!r} stands in the ledger already, for {self.patches[name].target}")
            self.patches[name] = Patch(
                name=name, target=target, why=why, reference=reference, remove_when=remove_when, replace=replace
            )
            return replace

        return add

    def install(self) -> None:
        """Arrange that each patch is applied when its module is imported, or now if it is. Idempotent."""
        for module in {patch.module for patch in self.patches.values()} - self._hooked:
            self._hooked.add(module)
            wrapt.register_post_import_hook(self._apply_to, module)

    def state(self, name: str) -> str:
        """``applied``, or ``pending`` while its module has not been imported."""
        return "applied" if name in self._originals else "pending"

    def undo(self) -> None:
        """Put every original back, newest first. The import hooks stay, so a later import applies again."""
        for owner, attribute, original in reversed(self._originals.values()):
            if original is _MISSING:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, original)
        self._originals.clear()

    def reapply(self) -> None:
        """Apply to every module that is loaded; for tests, after :meth:`undo`."""
        import sys

        for module in {patch.module for patch in self.patches.values()} & set(sys.modules):
            self._apply_to(sys.modules[module])

    def _apply_to(self, module: ModuleType) -> None:
        for patch in self.patches.values():
            if patch.module == module.__name__ and patch.name not in self._originals:
                self._apply(patch, module)

    def _apply(self, patch: Patch, module: ModuleType) -> None:
        *path, attribute = patch.target.partition(":")[2].split(".")
        owner: Any = module
        try:
            for part in path:
                owner = getattr(owner, part)
            original = getattr(owner, attribute)
        except AttributeError as error:
            raise RuntimeError(_moved(patch)) from error
        own = vars(owner).get(attribute, _MISSING)  # an inherited method is patched on the subclass, and deleted again
        self._originals[patch.name] = (owner, attribute, own)
        setattr(owner, attribute, patch.replace(own if isinstance(own, (classmethod, staticmethod)) else original))
        logger.info("patches: %s -> %s (%s)", patch.target, patch.name, patch.reference)


def _moved(patch: Patch) -> str:
    from importlib.metadata import version

    return explain(
        f"verl-fl's patch {patch.name!r} does not find its target {patch.target}",
        found=f"verl {version('verl')}, where that name does not exist",
        legal=f"verl {patch.versions}",
        fix="install a verl of that range, or a newer verl-fl",
    )


LEDGER = Ledger()
patch = LEDGER.patch
