"""What we change in stock verl, why, and until when. Importing this loads no verl: a change waits for its target."""

from verl_fl.patches import (
    attention,
    checkpoint,
    data,
    devices,
    distributed,
    empty,
    failures,
    flags,
    log_probs,
    logging,
    platform,
    preflight,
    profiling,
    resources,
    reward,
    threads,
)
from verl_fl.patches.ledger import LEDGER, Ledger, Patch

__all__ = [
    "LEDGER",
    "Ledger",
    "Patch",
    "attention",
    "checkpoint",
    "data",
    "devices",
    "distributed",
    "empty",
    "failures",
    "flags",
    "log_probs",
    "logging",
    "platform",
    "preflight",
    "profiling",
    "resources",
    "reward",
    "threads",
]
