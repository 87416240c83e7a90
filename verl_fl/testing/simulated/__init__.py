"""Simulated vendors: a real torch device made of host memory, with a mask, streams and collectives of its own."""

from __future__ import annotations

from verl_fl.testing.simulated.chip import Chip

__all__ = ["Chip", "install"]


def install(chip: Chip) -> object:
    """See :func:`verl_fl.testing.simulated.sdk.install`; imported on call, since it needs torch."""
    from verl_fl.testing.simulated import sdk

    return sdk.install(chip)
