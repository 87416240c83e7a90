"""Log calls of verl that raise instead of logging."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from verl_fl.patches.ledger import patch


class _FlushTolerantLogger(logging.LoggerAdapter):
    """A logger that ignores ``flush``, which is print's argument and not a logger's."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs.pop("flush", None)
        return msg, kwargs


@patch(
    target="verl.trainer.ppo.v1.trainer_separate_async:logger",
    why="logger.info(..., flush=True) raises TypeError and ends the run when hybrid_engine=False",
    reference="verl/trainer/ppo/v1/trainer_separate_async.py _setup",
    remove_when="verl calls the logger without flush",
)
def flush_in_separate_async(original: logging.Logger) -> logging.LoggerAdapter:
    return _FlushTolerantLogger(original, {})


@patch(
    target="verl.workers.rollout.sglang_rollout.http_server_engine:logger",
    why="logger.info(..., flush=True) raises TypeError when the SGLang server has started",
    reference="verl/workers/rollout/sglang_rollout/http_server_engine.py launch_server_process",
    remove_when="verl calls the logger without flush",
)
def flush_in_sglang(original: logging.Logger) -> logging.LoggerAdapter:
    return _FlushTolerantLogger(original, {})
