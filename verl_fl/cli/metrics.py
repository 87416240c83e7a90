"""What verl's file logger wrote, as numbers: one line of JSON a step, in one file for each start of the run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One training step, as verl measured it."""

    number: int
    reward: float
    """Mean score of the step's answers, before any KL penalty; NaN when there was none."""
    seconds: float
    tokens: int
    """Prompt and response tokens of the step's batch."""
    response_length: float
    """Mean, in tokens."""
    validation_seconds: float = 0.0
    """Spent on validation after the step, before its line was written."""


def parse(line: str | bytes) -> Step | None:
    """Return the step a line tells of, or None for one that is not a training step, or is cut off."""
    try:
        record = json.loads(line)
        number, data = int(record["step"]), record["data"]
        if "timing_s/step" not in data:  # validation alone
            return None
    except (ValueError, KeyError, TypeError):
        return None
    return Step(
        number=number,
        reward=_number(data, "critic/score/mean", "critic/rewards/mean"),
        seconds=_number(data, "timing_s/step"),
        tokens=int(_number(data, "perf/total_num_tokens", default=0.0)),
        response_length=_number(data, "response_length/mean"),
        validation_seconds=_number(data, "timing_s/testing", default=0.0),
    )


def _number(data: dict[str, Any], *names: str, default: float = math.nan) -> float:
    for name in names:
        if isinstance(data.get(name), (int, float)):
            return float(data[name])
    return default


class Tail:
    """Reads the lines that were added to a file since the last look; the file may not exist yet."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        self._rest = b""

    def lines(self) -> list[str]:
        """The complete new lines."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *complete, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in complete]


def files(run_dir: Path) -> list[Path]:
    """The metrics files of a run folder, oldest start first."""
    return sorted(run_dir.glob("metrics-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))


def next_file(run_dir: Path) -> Path:
    """A file for one more start: verl's logger truncates what it opens, so that a resumed run needs a new one."""
    return run_dir / f"metrics-{len(files(run_dir)) + 1}.jsonl"


def read(paths: Iterable[Path]) -> list[Step]:
    """The steps of all starts in order; a step that was run again counts as it came out last."""
    steps: dict[int, Step] = {}
    for path in paths:
        fresh = [step for line in path.read_bytes().splitlines() if (step := parse(line)) is not None]
        if fresh:  # what an earlier start did after its last checkpoint is not part of this line of training
            steps = {number: step for number, step in steps.items() if number < fresh[0].number}
        steps |= {step.number: step for step in fresh}
    return [steps[number] for number in sorted(steps)]


def validation(paths: Iterable[Path]) -> dict[str, float]:
    """The scores of the last validation, by verl's names (``val-core/...``); empty without one."""
    last: dict[str, float] = {}
    for path in paths:
        for line in path.read_bytes().splitlines():
            try:
                data = json.loads(line)["data"]
            except (ValueError, KeyError, TypeError):  # a line that was cut off
                continue
            last = {name: value for name, value in data.items() if name.startswith("val-core/")} or last
    return last
