"""How long the check that runs now may still take: what it starts has to speak before the kit stops listening."""

from __future__ import annotations

import time

_deadline = _margin = 0.0


def start(seconds: float) -> None:
    """A check begins that has this long."""
    global _deadline, _margin
    _deadline, _margin = time.monotonic() + seconds, seconds / 10


def left() -> float:
    """Seconds for a process of the check, a margin less than the check's own; at least one."""
    return max(1.0, _deadline - _margin - time.monotonic())
