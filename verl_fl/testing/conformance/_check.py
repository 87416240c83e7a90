"""What a check is, and how it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verl_fl._errors import explain
from verl_fl.platform.base import Platform


class Failed(Exception):
    """The platform does not hold what the check asks."""


class Skip(Exception):
    """The check can't be made here, or the platform says that it lacks what is asked."""


Question = Callable[[Platform], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One named question to a platform."""

    name: str
    """With dashes; what ``--only`` and ``--skip`` take."""

    why: str
    """What goes wrong in a training where it fails, in a sentence."""

    group: str
    """The column of the support matrix."""

    run: Question
    """Asks it of an instance; raises :class:`Failed` or :class:`Skip`, or returns what a pass rests on."""

    processes: int = 0
    """Fresh Python processes it starts: 0 runs in the kit's own."""

    needs: tuple[str, ...] = ()
    """Packages beyond torch without which it is skipped."""


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order they run."""


def check(why: str, *, group: str, processes: int = 0, needs: tuple[str, ...] = ()) -> Callable[[Question], Question]:
    """Decorate a check; its name is the function's."""

    def add(run: Question) -> Question:
        name = run.__name__.replace("_", "-")
        assert name not in CHECKS, name
        CHECKS[name] = Check(name=name, why=why, group=group, run=run, processes=processes, needs=needs)
        return run

    return add


def expect(holds: object, problem: str, *, found: object = None, legal: object = None, fix: str = "") -> None:
    """Fail the check where ``holds`` is false.

    Raises:
        Failed: with all parts that are given.
    """
    if not holds:
        raise Failed(explain(problem, found=found, legal=legal, fix=fix))
