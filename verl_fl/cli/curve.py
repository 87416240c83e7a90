"""The reward curve: in the terminal, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from verl_fl.cli.metrics import Step

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def in_terminal(steps: Sequence[Step], width: int = 80, height: int = 10) -> str:
    """Return the curve as ``height`` lines of bars, one or more columns a step, with its axes; no colours."""
    points = [step for step in steps if not math.isnan(step.reward)]
    if not points:
        return "no rewards to show"
    low, high = _scale([step.reward for step in points])
    columns = _fit(points, room=width - 9)
    lines = []
    for row in range(height, 0, -1):
        bars = "".join(_cell((reward - low) / (high - low) * height, row) for reward in columns)
        label = f"{low + (high - low) * row / height:8.2f}" if row in (height, height // 2) else " " * 8
        lines.append(f"{label}┤{bars}")
    lines.append(f"{low:8.2f}┼" + "─" * len(columns))
    first, last = str(points[0].number), str(points[-1].number)
    lines.append(" " * 9 + f"{first}{last:>{max(len(columns) - len(first), 1)}}  step")
    return "\n".join(lines)


def _scale(rewards: Sequence[float]) -> tuple[float, float]:
    """Rewards between 0 and 1 get that scale, so that curves can be compared; others their own."""
    low, high = min(rewards), max(rewards)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _fit(points: Sequence[Step], room: int) -> list[float]:
    """One value a column: wider columns for few steps, the mean of neighbours for many."""
    if len(points) <= room:
        return [step.reward for step in points for _ in range(min(room, 60) // len(points) or 1)]
    size = math.ceil(len(points) / room)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [sum(step.reward for step in group) / len(group) for group in groups]


def _cell(level: float, row: int) -> str:
    return _EIGHTHS[round(min(max(level - (row - 1), 0.0), 1.0) * 8)]


def as_png(steps: Sequence[Step], target: Path, title: str) -> None:
    """Draw it to ``target``; needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = [step for step in steps if not math.isnan(step.reward)]
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([step.number for step in known], [step.reward for step in known], marker="o", markersize=3)
    axes.set(xlabel="step", ylabel="mean reward", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(target)
