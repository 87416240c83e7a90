"""One way to act on a check's level: raise, warn or keep quiet."""

from __future__ import annotations

import logging
import math

logger = logging.getLogger("verl_fl.preflight")


def report(level: str, message: str, *, key: str, error: type[Exception] = ValueError) -> None:
    """Raise ``error`` at level ``error``, log a warning at ``warn``, else do nothing.

    ``key`` is the setting that lowers the level; the message names it.
    """
    if level == "error":
        raise error(f"{message}\n  or: {key}=warn runs all the same")
    if level == "warn":
        logger.warning("preflight: %s", message)


def gigabytes(num_bytes: float) -> str:
    """``num_bytes`` in GB with two digits that count."""
    size = num_bytes / 1e9
    digits = 1 if size >= 0.95 or size == 0 else min(3, 1 - math.floor(math.log10(size)))
    return f"{size:.{digits}f} GB"
