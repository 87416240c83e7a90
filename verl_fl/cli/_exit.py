"""How a command ends badly: which exit code, and what stands on the screen."""

from __future__ import annotations

from verl_fl._errors import explain

USAGE = 2
FAILED = 1
INTERRUPTED = 130


class UsageError(ValueError):
    """What the user asked for can't be done; nothing was started."""

    exit_code = USAGE


class RunError(RuntimeError):
    """The machine could not do it."""

    exit_code = FAILED


def usage(
    problem: str, *, asked: object = None, found: object = None, legal: object = None, fix: str = ""
) -> UsageError:
    """Return a :class:`UsageError` in the four parts of :func:`verl_fl._errors.explain`."""
    return UsageError(explain(problem, asked=asked, found=found, legal=legal, fix=fix))
