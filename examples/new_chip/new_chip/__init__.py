"""Loaded by ``import verl``, through this package's entry point: makes verl know the chip."""

import verl_fl
from new_chip.platform import NewChip

verl_fl.register(NewChip)
