"""What the user sees while verl runs: a bar on a terminal, a line a step elsewhere; both say when nothing happens."""

from __future__ import annotations

import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from verl_fl.cli.metrics import Step

_STALL_S = 60.0

PHASES = (
    (re.compile(r"ray init kwargs"), "starting Ray"),
    (re.compile(r"Started a local Ray instance"), "loading verl"),
    (re.compile(r"Using dataset class|dataset len:"), "reading the prompts"),
    (re.compile(r"Total training steps:"), "loading the model to train"),
    (re.compile(r"actor and ref model engine initialized"), "loading the model that answers"),
    (re.compile(r"all initialize finished"), "first step"),
)
"""What verl prints on its way, and what it means to a user, in order."""

_ERROR = re.compile(r"(?:^|\) )ERROR:[\d\- :,]+:(.*)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def phase_of(line: str) -> int | None:
    """The index into :data:`PHASES` that a line of verl's log announces."""
    return next((index for index, (pattern, _) in enumerate(PHASES) if pattern.search(line)), None)


class Progress:
    """The state of a run as far as it has been seen, and the one place that prints it."""

    def __init__(self, total: int, log: Path, done: int = 0, out: TextIO | None = None) -> None:
        self.steps: list[Step] = []
        self._total = total
        self._log = log
        self._done = done
        self._out = out or sys.stdout
        self._phase = -1
        self._errors: set[str] = set()
        self._began = self._changed = self._told = time.monotonic()
        self._first_start: float | None = None
        self._last_end: float | None = None
        self._bar = _Bar(total, done) if self._out.isatty() else None

    @property
    def train_seconds(self) -> float | None:
        """From the start of this start's first step to the end of its last; None before one."""
        if self._first_start is None or self._last_end is None:
            return None
        return self._last_end - self._first_start

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        if self._bar:
            self._bar.print(text)
        else:
            print(text, file=self._out, flush=True)

    def log_line(self, line: str) -> None:
        """Take in a line of verl's log: a new phase, or an error that does not end the run, shown once."""
        if (match := _ERROR.search(_ANSI.sub("", line))) is not None:
            self._error(match[1])
        index = phase_of(line)
        if index is None or index <= self._phase or self.steps:
            return
        self._phase, self._changed = index, time.monotonic()
        text = PHASES[index][1]
        if self._bar:
            self._bar.phase(text)
        else:
            self.say(f"{self._changed - self._began:6.1f} s  {text}")

    def _error(self, message: str) -> None:
        kind = re.sub(r"\d+", "#", message)
        if kind not in self._errors:
            self._errors.add(kind)
            self.say(f"error: {message}")

    def step(self, step: Step) -> None:
        """Take in a step that has just ended."""
        now = time.monotonic()
        self._changed, self._last_end = now, now - step.validation_seconds
        if self._first_start is None:
            self._first_start = self._last_end - step.seconds
        self.steps.append(step)
        speed = step.tokens / step.seconds if step.seconds > 0 else 0.0
        if self._bar:
            self._bar.step(step, speed)
        else:
            self.say(
                f"step {step.number:3d}/{self._total}  reward {step.reward:6.3f}  {speed:7.0f} tokens/s  "
                f"answer {step.response_length:5.1f} tokens  {step.seconds:5.1f} s"
            )

    def tick(self) -> None:
        """Say so if nothing has happened for long: a minute, or five times a usual step."""
        limit_s = max(_STALL_S, 5 * statistics.median(step.seconds for step in self.steps) if self.steps else 0.0)
        now = time.monotonic()
        if now - max(self._changed, self._told) < limit_s:
            return
        self._told = now
        what = f"step {self.steps[-1].number + 1}" if self.steps else PHASES[max(self._phase, 0)][1]
        self.say(f"still at: {what}, since {now - self._changed:.0f} s; see {self._log}")


class _Bar:
    """A rich progress bar with the reward and the speed of the last step."""

    def __init__(self, total: int, done: int) -> None:
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._progress = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
        )
        self._task: Any = self._progress.add_task("starting", total=total, completed=done, figures="")

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def phase(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def step(self, step: Step, speed: float) -> None:
        figures = f"reward {step.reward:.3f}  {speed:.0f} tokens/s"
        self._progress.update(self._task, description="training", completed=step.number, figures=figures)
