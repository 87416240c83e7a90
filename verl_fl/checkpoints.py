"""Which checkpoint of a folder is whole, and whether the disk can hold another."""

from __future__ import annotations

import logging
import re
import shutil
import zipfile
from pathlib import Path

from verl_fl._errors import explain

logger = logging.getLogger("verl_fl.checkpoint")

TRACKER = "latest_checkpointed_iteration.txt"
_NO_DATA = "no data.pt, which is written last"
_SHARD = re.compile(r"(?P<kind>\w+)_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt")


def newest_complete(root: Path, directory_format: str = "global_step_{}") -> Path | None:
    """The newest whole checkpoint below ``root``, whatever the tracker file says; None if there is no folder at all.

    Everything that is skipped, and every disagreement with the tracker, is a warning. Where none is whole, the newest
    that lacks nothing but the place in the data is taken.

    Raises:
        RuntimeError: there are checkpoints, and none is whole.
    """
    steps = _steps(root, directory_format)
    tracked, complaint = read_tracker(root)
    if complaint and (steps or (root / TRACKER).exists()):
        logger.warning("checkpoint: %s", complaint)
    if tracked is not None and tracked not in steps:
        logger.warning("checkpoint: %s names step %d, and there is no such folder", root / TRACKER, tracked)
    problems: dict[Path, str] = {}
    for step in sorted(steps, reverse=True):
        problem = why_incomplete(steps[step], finished=tracked is not None and step <= tracked)
        if problem is None:
            if tracked is not None and step != tracked:
                logger.warning("checkpoint: resuming from step %d, though the tracker names step %d", step, tracked)
            return steps[step]
        problems[steps[step]] = problem
        logger.warning("checkpoint: %s is half-written (%s), skipped", steps[step], problem)
    # Stock verl, told to keep one, removes the last whole checkpoint before the next one has its data.pt.
    roles = {role for role in ("actor", "critic") for folder in steps.values() if (folder / role).is_dir()}
    almost = [
        path
        for path, problem in problems.items()
        if problem == _NO_DATA and all((path / role).is_dir() for role in roles)
    ]
    if almost:
        logger.warning("checkpoint: resuming from %s all the same: its model is whole, the data begins anew", almost[0])
        return almost[0]
    if problems:
        raise RuntimeError(_none_whole(root, problems))
    return None


def _steps(root: Path, directory_format: str) -> dict[int, Path]:
    pattern = re.compile(re.escape(directory_format).replace(r"\{\}", r"(\d+)"))
    folders = [(pattern.fullmatch(path.name), path) for path in root.iterdir()] if root.is_dir() else []
    return {int(match.group(1)): path for match, path in folders if match and path.is_dir()}


def read_tracker(root: Path) -> tuple[int | None, str | None]:
    """``(step, None)``, or ``(None, what is wrong)``."""
    tracker = root / TRACKER
    if not tracker.is_file():
        return None, f"{tracker} is missing, though there are checkpoints"
    text = tracker.read_text(errors="replace").strip()
    if not text.isdigit():
        return None, f"{tracker} holds {text[:20]!r} and no step" if text else f"{tracker} is empty"
    return int(text), None


def why_incomplete(folder: Path, *, finished: bool) -> str | None:
    """What ``folder`` lacks of a whole checkpoint, or None.

    ``finished``: the tracker has reached it, so its save did end. Then a missing ``data.pt`` was taken away later (verl
    goes on without it), a rank without any file may have saved on another node's disk, and a format whose files can't
    be judged is taken to be whole.
    """
    if not (folder / "actor").is_dir():
        return "no folder 'actor'"
    for role in ("actor", "critic"):
        if (folder / role).is_dir():
            problem = _role_problem(folder / role, finished=finished)
            if problem:
                return problem
    data = folder / "data.pt"
    if data.exists():
        return None if zipfile.is_zipfile(data) else "data.pt is truncated"
    return None if finished else _NO_DATA


def _role_problem(folder: Path, *, finished: bool) -> str | None:
    shards = {match.groups(): path for path in folder.iterdir() if (match := _SHARD.fullmatch(path.name))}
    if not shards:
        return None if finished and any(folder.iterdir()) else f"no shard in {folder.name}"
    kinds = {kind for kind, _, _ in shards}
    for world in {world for _, world, _ in shards}:
        for rank in map(str, range(int(world))):
            absent = sorted(kind for kind in kinds if (kind, world, rank) not in shards)
            if absent and not (finished and len(absent) == len(kinds)):
                return f"{folder.name}: {absent[0]} of rank {rank} of {world} is missing"
    broken = sorted(path.name for path in shards.values() if not zipfile.is_zipfile(path))
    return f"{folder.name}: {broken[0]} is truncated" if broken else None


def _none_whole(root: Path, problems: dict[Path, str]) -> str:
    return explain(
        "there are checkpoints to resume from, and none is whole",
        asked=f"trainer.resume_mode=auto, trainer.default_local_dir={root}",
        found="; ".join(f"{path.name}: {problem}" for path, problem in list(problems.items())[:4]),
        fix="start afresh with trainer.resume_mode=disable or another trainer.default_local_dir, or name a checkpoint "
        "with trainer.resume_mode=resume_path trainer.resume_from_path=...",
    )


def size_of(folder: Path) -> int:
    """Bytes of all files below ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def free_bytes(folder: Path) -> int:
    """Free bytes of the file system that holds ``folder``, or will once it is made."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """``folder``, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())
