"""Reward functions: one that hangs, exits or returns nonsense fails its own sample, and says so."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from verl_fl.patches.ledger import patch

logger = logging.getLogger("verl_fl.reward")


@patch(
    target="verl.trainer.ppo.reward:get_custom_reward_fn",
    why="verl calls the user's reward function in a thread of the reward worker: one that sleeps or spins freezes the "
    "run, one that exits ends the worker",
    reference="case slow-reward; verl/experimental/reward_loop/reward_manager/naive.py run_single",
    remove_when="verl runs reward functions in processes with a limit",
)
def reward_in_child(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_custom_reward_fn(config: Any) -> Callable | None:
        from verl_fl._settings import read_settings
        from verl_fl.reward.guard import GuardedReward, in_process

        chosen = config.reward.get("custom_reward_function") or {}
        if not chosen.get("path"):
            return original(config)
        timeout_s = float(read_settings(config).reward__timeout_s)
        reward_kwargs = dict(chosen.get("reward_kwargs") or {})
        if not config.reward.reward_model.enable:  # else it is handed the reward model's tokenizer and address
            guarded = GuardedReward(str(chosen["path"]), str(chosen["name"]), reward_kwargs, timeout_s)
            if guarded.pool.kind() == "function":
                return guarded
            guarded.pool.close()
        return in_process(original(config), {}, timeout_s)

    return get_custom_reward_fn


@patch(
    target="verl.experimental.reward_loop.reward_loop:RewardLoopWorker.compute_score",
    why="a reward of None, NaN or a dictionary without 'score' fails later under another name, and a reward that "
    "raises is reported as a prompt without trajectories; a reward model's own result lacks reward_extra_info",
    reference="cases reward-shapes and slow-reward; verl/experimental/reward_loop/reward_loop.py compute_score",
    remove_when="verl checks what a reward manager returns and names the sample it came from",
)
def checked_reward(original: Callable) -> Callable:
    @functools.wraps(original)
    async def compute_score(self: Any, data: Any) -> dict[str, Any]:
        from verl_fl._settings import read_settings
        from verl_fl.reward.child import describe
        from verl_fl.reward.guard import REASON, FailedScore, RewardFailed, failure_of

        try:
            result = await original(self, data)
            reason = failure_of(result)
        except Exception as error:
            result, reason = {}, f"raised {describe(error)}"
        extra = {
            key: 0.0 if isinstance(value, FailedScore) else value
            for key, value in (result.get("reward_extra_info") or {}).items()
        }
        if reason is None:
            return {**result, "reward_extra_info": extra}
        text = _sentence(self.config, data, reason)
        if read_settings(self.config).reward__on_error == "raise":
            raise RewardFailed(text)
        return {**result, "reward_score": 0.0, "reward_extra_info": {**extra, REASON: text}}

    return compute_score


def _sentence(config: Any, data: Any, reason: str) -> str:
    from verl_fl._settings import select

    name = select(config, "reward.custom_reward_function.name", "compute_score")
    path = select(config, "reward.custom_reward_function.path")
    what = f"reward function {name} of {path}" if path else f"{select(config, 'reward.reward_manager.name')} reward"
    sources = data.non_tensor_batch.get("data_source", ["none"])
    return f"{what} {reason}; data_source {str(sources[-1])!r}"


@patch(
    target="verl.experimental.reward_loop.reward_loop:RewardLoopWorker.compute_score_batch",
    why="with a colocated reward model there is no agent loop to carry a failed call's reason, and samples of "
    "different keys raise KeyError in compute_rm_score",
    reference="case reward-shapes; verl/experimental/reward_loop/reward_loop.py compute_rm_score",
    remove_when="checked-reward is removed",
)
def checked_reward_batch(original: Callable) -> Callable:
    @functools.wraps(original)
    async def compute_score_batch(self: Any, data: Any) -> list[dict[str, Any]]:
        from verl_fl.reward.guard import REASON, all_failed

        outputs = await original(self, data)
        reasons = [output["reward_extra_info"].pop(REASON, None) for output in outputs]
        failed = [reason for reason in reasons if reason is not None]
        if failed and len(failed) == len(outputs):
            raise RuntimeError(all_failed(len(failed), failed[:1]))
        for reason in sorted(set(failed)):
            logger.error("reward: %s (%d of %d samples)", reason, failed.count(reason), len(outputs))
        keys = {key: None for output in outputs for key in output["reward_extra_info"]}
        for output in outputs:
            output["reward_extra_info"] = {**keys, **output["reward_extra_info"]}
        return outputs

    return compute_score_batch
