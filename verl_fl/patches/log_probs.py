"""Log-probabilities where there is no fused cross-entropy kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl_fl import _verl
from verl_fl.patches.ledger import patch

_WHERE = "verl/utils/torch_functional.py"


@patch(
    target="verl.utils.torch_functional:logprobs_from_logits",
    why="without FlashAttention's kernel verl runs a Python loop over tokens, with log-probabilities rounded to the "
    "logits' bfloat16: slow, and further from the rollout's than the model is",
    reference=f"{_WHERE} logprobs_from_logits_v2",
    remove_when="verl's fallback computes in fp32 without a loop over rows",
)
def log_probs_in_fp32(original: Callable) -> Callable:
    @functools.wraps(original)
    def logprobs_from_logits(logits: Any, labels: Any, inplace_backward: bool = True) -> Any:
        if not _verl.on_our_platform() or _verl.supports("flash_attention_2")[0]:
            return original(logits, labels, inplace_backward=inplace_backward)
        from verl_fl.engine.log_probs import token_log_probs

        return token_log_probs(logits, labels)

    return logprobs_from_logits


@patch(
    target="verl.utils.torch_functional:entropy_from_logits",
    why="verl makes three copies of all logits to sum the entropy, in the logits' bfloat16",
    reference=f"{_WHERE} entropy_from_logits",
    remove_when="verl's entropy is computed in slices and in fp32",
)
def entropy_in_fp32(original: Callable) -> Callable:
    @functools.wraps(original)
    def entropy_from_logits(logits: Any) -> Any:
        if not _verl.on_our_platform():
            return original(logits)
        from verl_fl.engine.log_probs import token_entropy

        return token_entropy(logits)

    return entropy_from_logits


@patch(
    target="verl.utils.debug.metrics:calculate_debug_metrics",
    why="verl reports how far the rollout's probabilities are from the trainer's, not its log-probabilities, which are "
    "what the losses use and what engines are compared by",
    reference="docs/cpu.md; verl/utils/debug/metrics.py",
    remove_when="verl logs the difference of log-probabilities",
)
def log_prob_difference(original: Callable) -> Callable:
    @functools.wraps(original)
    def calculate_debug_metrics(data: Any) -> dict[str, float]:
        metrics = original(data)
        if metrics.get("training/rollout_probs_diff_valid"):
            mask = data.batch["response_mask"].bool() if "response_mask" in data.batch else None
            difference = (data.batch["rollout_log_probs"] - data.batch["old_log_probs"]).abs()
            difference = difference if mask is None else difference[mask[:, -difference.shape[1] :]]
            metrics["training/rollout_log_probs_diff/mean"] = difference.mean().item()
            metrics["training/rollout_log_probs_diff/max"] = difference.max().item()
        return metrics

    return calculate_debug_metrics
