"""summary.json: what a run came to, in figures that can be compared."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl_fl._version import __version__
from verl_fl.cli import metrics
from verl_fl.cli.metrics import Step
from verl_fl.cli.options import Options

WINDOW = 3
"""Steps whose mean is a run's first and last reward."""

_PACKAGES = ("torch", "ray", "verl", "transformers", "tensordict", "TransferQueue")


def figures(steps: Sequence[Step], wall_s: float | None = None) -> dict[str, Any]:
    """Return the figures of ``steps``.

    Args:
        steps: all steps of the run, in order.
        wall_s: from the start of the first to the end of the last, measured; None: the sum of the steps' own times.
    """
    rewards = [step.reward for step in steps if not math.isnan(step.reward)]
    seconds = sum(step.seconds for step in steps) if wall_s is None else wall_s
    tokens = sum(step.tokens for step in steps)
    return {
        "reward_first": _mean(rewards[:WINDOW]),
        "reward_last": _mean(rewards[-WINDOW:]),
        # The last one's number: a run that was stopped between a save and its log line has no row for that step.
        "steps": steps[-1].number if steps else 0,
        "train_seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds, 1) if seconds > 0 else None,
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def write(
    options: Options, steps: Sequence[Step], wall_s: float | None, command: Sequence[str], paths: dict[str, str]
) -> Path:
    """Write the file and return its path."""
    summary = {
        **figures(steps, wall_s),
        "seed": options.seed,
        "validation": metrics.validation(metrics.files(Path(options.out))),
        "rewards": [None if math.isnan(step.reward) else round(step.reward, 4) for step in steps],
        "options": asdict(options),
        "command": shlex.join(sys.argv),
        "verl_command": shlex.join(command),
        "versions": versions(),
        "paths": paths,
    }
    target = Path(options.out) / "summary.json"
    target.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return target


def versions() -> dict[str, str]:
    """Python's, verl-fl's and its parts' versions; read from package metadata, so that nothing is imported."""
    found = {"python": sys.version.split()[0], "verl-fl": __version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
