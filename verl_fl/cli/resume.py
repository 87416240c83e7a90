"""A run folder as something to go on with: ``run.json`` says what was asked, ``checkpoints`` how far it came."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from verl_fl.cli._exit import usage
from verl_fl.cli.options import Options, check_overrides

_CHANGEABLE = ("steps", "save_every")
_FILE = "run.json"


def save(options: Options, prepared: dict[str, str | None]) -> None:
    """Write ``run.json``; ``prepared`` holds the local paths of model, train and reward."""
    text = json.dumps({"options": asdict(options), "prepared": prepared}, indent=2)
    (Path(options.out) / _FILE).write_text(text + "\n", encoding="utf-8")


def checkpoint(run_dir: Path) -> int:
    """The step of the last complete checkpoint; 0: there is none."""
    try:
        step = int((run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return 0
    return step if (run_dir / "checkpoints" / f"global_step_{step}").is_dir() else 0


def load(run_dir: Path, asked: dict[str, Any], overrides: list[str]) -> tuple[Options, dict[str, str | None]]:
    """Return what the folder's run was asked for, with the changes that are legal.

    Raises:
        UsageError: there is nothing to go on with, or something else was to be changed.
    """
    run_dir = run_dir.expanduser().absolute()
    command = f"--resume {run_dir}"
    given = {name: value for name, value in asked.items() if value is not None}
    if other := [name for name in given if name not in _CHANGEABLE]:
        options = ", ".join("--" + name.replace("_", "-") for name in other)
        raise usage(
            f"a resumed run keeps its own {options}",
            asked=f"{command} with {options}",
            legal="--steps, --save-every and overrides (key=value)",
            fix="leave it out, or start a new run",
        )
    try:
        record = json.loads((run_dir / _FILE).read_text(encoding="utf-8"))
        options_before = record["options"]
        before = Options(**{**options_before, "overrides": tuple(options_before["overrides"]), "out": str(run_dir)})
        prepared = dict(record["prepared"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise usage(
            f"{run_dir} is not a run folder of quickstart",
            asked=command,
            found=f"{_FILE}: {type(error).__name__}",
            legal="a folder that an earlier run printed as its own",
            fix="name that folder",
        ) from error
    step = checkpoint(run_dir)
    if step == 0:
        raise usage(
            f"{run_dir} has no checkpoint",
            asked=command,
            found=f"save_every {before.save_every}",
            legal="a run that came to its first checkpoint",
            fix="start a new run, with --save-every N",
        )
    chosen = replace(before, **given, overrides=before.overrides + check_overrides(overrides))
    if chosen.steps <= step:
        raise usage(
            f"{run_dir} is at step {step} already",
            asked=f"{command}, {chosen.steps} steps",
            legal=f"--steps above {step}",
            fix=f"--resume {run_dir} --steps {step + before.steps}",
        )
    save(chosen, prepared)
    return chosen, prepared
