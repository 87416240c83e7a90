"""Batches in which no token counts: they teach nothing, and their numbers are zeros instead of NaN."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from verl_fl.patches.ledger import patch


@patch(
    target="verl.trainer.ppo.core_algos:agg_loss",
    why="a mini-batch of empty answers divides zero by its zero tokens: the loss and every gradient are NaN",
    reference="case empty-answer; verl/trainer/ppo/core_algos.py agg_loss",
    remove_when="verl's losses are zero where no token counts",
)
def loss_of_no_token(original: Callable) -> Callable:
    @functools.wraps(original)
    def agg_loss(loss_mat: Any, loss_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if not loss_mask.any():
            return (loss_mat * 0.0).sum()  # the sum of no term, with a gradient of zeros
        return original(loss_mat, loss_mask, *args, **kwargs)

    return agg_loss


@patch(
    target="verl.utils.torch_functional:masked_whiten",
    why="GAE raises 'At least one element in the mask has to be 1' for a batch of empty answers",
    reference="case empty-answer; verl/utils/torch_functional.py masked_var",
    remove_when="verl whitens no element without raising",
)
def whiten_no_token(original: Callable) -> Callable:
    @functools.wraps(original)
    def masked_whiten(values: Any, mask: Any, shift_mean: bool = True) -> Any:
        return original(values, mask, shift_mean) if mask.any() else values * 0.0

    return masked_whiten


@patch(
    target="verl.trainer.ppo.metric_utils:compute_data_metrics",
    why="a batch of empty answers logs NaN for advantages, returns and values, which some trackers refuse",
    reference="case empty-answer; verl/trainer/ppo/metric_utils.py compute_data_metrics",
    remove_when="verl leaves out, or zeroes, what has no element",
)
def metrics_of_no_token(original: Callable) -> Callable:
    @functools.wraps(original)
    def compute_data_metrics(batch: Any, use_critic: bool = True) -> dict[str, Any]:
        metrics = original(batch, use_critic)
        if batch.batch["response_mask"].any():
            return metrics
        return {name: 0.0 if isinstance(v, float) and math.isnan(v) else v for name, v in metrics.items()}

    return compute_data_metrics
