"""Checkpoints: resume from the newest whole one, and never leave half of one behind."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_fl._errors import explain
from verl_fl.patches.ledger import patch

logger = logging.getLogger("verl_fl.checkpoint")


@patch(
    target="verl.utils.checkpoint.checkpoint_manager:find_latest_ckpt_path",
    why="verl resumes from the folder that the tracker names, whole or not; a tracker that is missing restarts the run "
    "from zero in silence, and one that is empty (killed while writing it) ends it with a ValueError",
    reference="case async-save-no-tracker; verl/utils/checkpoint/checkpoint_manager.py",
    remove_when="verl checks a checkpoint before it resumes, and never restarts from zero beside checkpoints",
)
def whole_checkpoint(original: Callable) -> Callable:
    @functools.wraps(original)
    def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
        from verl_fl.checkpoints import newest_complete

        if path is None:
            return None
        found = newest_complete(Path(path), directory_format)
        return None if found is None else str(found)

    return find_latest_ckpt_path


@patch(
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._save_checkpoint",
    why="a disk that fills up while a checkpoint is written leaves half of it, and the error names a stream writer",
    reference="verl/trainer/ppo/v1/trainer_base.py _save_checkpoint",
    remove_when="verl checks the space first and removes what it could not finish",
)
def whole_save(original: Callable) -> Callable:
    @functools.wraps(original)
    def _save_checkpoint(self: Any) -> None:
        root = Path(self.config.trainer.default_local_dir)
        folder = root / f"global_step_{self.global_steps}"
        check_space(root, self.config.trainer)
        existed = folder.exists()
        try:
            original(self)
        except Exception as error:
            if not _disk_is_full(error):
                raise
            if not existed:
                shutil.rmtree(folder, ignore_errors=True)
            raise RuntimeError(_full(folder, error)) from error

    return _save_checkpoint


def check_space(root: Path, trainer_config: Any) -> None:
    """Check that the disk can hold another checkpoint as large as the newest one; without one, do nothing.

    Raises:
        RuntimeError: it can't; with need and supply.
    """
    from verl_fl.checkpoints import free_bytes, size_of
    from verl_fl.preflight._report import gigabytes

    previous = sorted(root.glob("global_step_*"), key=lambda path: path.stat().st_mtime) if root.is_dir() else []
    need = size_of(previous[-1]) if previous else 0
    keep = trainer_config.get("max_actor_ckpt_to_keep") or 0
    # From two on, verl removes the oldest before it writes.
    supply = free_bytes(root) + (size_of(previous[0]) if keep > 1 and len(previous) >= keep else 0)
    if need > supply:
        raise RuntimeError(
            explain(
                "the disk can't hold another checkpoint, so it was not begun",
                asked=f"{gigabytes(need)}, as large as {previous[-1].name}",
                found=f"{gigabytes(supply)} free at {root}",
                fix="remove old checkpoints, set trainer.max_actor_ckpt_to_keep=2, or move trainer.default_local_dir; "
                f"then run again: it resumes from {previous[-1].name}",
            )
        )


def _disk_is_full(error: BaseException) -> bool:
    text = str(error)
    signs = ("No space left on device", "Disk quota exceeded", "PytorchStreamWriter failed", "file write failed")
    return any(sign in text for sign in signs)


def _full(folder: Path, error: BaseException) -> str:
    from verl_fl.checkpoints import free_bytes
    from verl_fl.preflight._report import gigabytes

    cause = getattr(error, "cause", None) or error
    return explain(
        "the checkpoint could not be written, and what there was of it has been removed",
        asked=str(folder),
        found=f"{type(cause).__name__}: {str(cause).strip().splitlines()[-1][:200]}; "
        f"{gigabytes(free_bytes(folder))} free now",
        fix="make room or move trainer.default_local_dir, and run again: it resumes from the checkpoint before",
    )
