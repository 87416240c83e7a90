"""Reward functions as verl's managers call them, with a limit and a reason for every call that fails."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from verl_fl._errors import explain
from verl_fl.reward.child import describe, normalise
from verl_fl.reward.pool import RewardPool

REASON = "fl_reward_failed"
"""Key of ``reward_extra_info`` under which a failed call's reason travels to the agent loop, which takes it out."""


class RewardFailed(RuntimeError):
    """A reward call failed and ``fl.reward.on_error=raise`` was set."""


class FailedScore(float):
    """The score 0 of a call that failed; ``reason`` says how."""

    reason: str

    def __new__(cls, reason: str) -> FailedScore:
        score = super().__new__(cls, 0.0)
        score.reason = reason
        return score

    def __reduce__(self) -> tuple:
        return FailedScore, (self.reason,)


class GuardedReward:
    """A synchronous reward function that runs in a :class:`RewardPool`. Pickles by its path.

    A call that fails returns a :class:`FailedScore`, inside a dictionary of the same keys as the last good result if
    that was one, so that all samples of a batch keep the same keys.
    """

    def __init__(self, path: str, name: str, reward_kwargs: dict[str, Any], timeout_s: float) -> None:
        self._made_of = (path, name, reward_kwargs, timeout_s)
        self.pool = RewardPool(path, name, timeout_s=timeout_s)
        self._neutral: dict[str, Any] | None = None

    def __reduce__(self) -> tuple:
        return GuardedReward, self._made_of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's score or dictionary; never raises, never takes longer than the limit once its turn comes."""
        value, reason = self.pool.call(*args, **{**kwargs, **self._made_of[2]})
        if reason is not None:
            score = FailedScore(reason)
            return score if self._neutral is None else {**self._neutral, "score": score}
        if isinstance(value, dict):
            self._neutral = {key: _neutral(entry) for key, entry in value.items()}
        return value


def _neutral(value: Any) -> Any:
    return type(value)() if isinstance(value, bool | int | float | str) else None


def in_process(function: Callable, reward_kwargs: dict[str, Any], timeout_s: float) -> Callable:
    """A coroutine function around ``function`` that fails after ``timeout_s`` instead of waiting on.

    For functions that await, or that need objects of this process. One that blocks can be given up, not stopped.
    """

    @functools.wraps(function)
    async def compute_score(*args: Any, **kwargs: Any) -> Any:
        kwargs = {**kwargs, **reward_kwargs}
        if asyncio.iscoroutinefunction(function):
            pending = function(*args, **kwargs)
        else:
            pending = asyncio.to_thread(function, *args, **kwargs)
        try:
            value, reason = normalise(await asyncio.wait_for(pending, timeout_s))
        except asyncio.TimeoutError:
            value, reason = None, f"took longer than {timeout_s:g} s"
        except Exception as error:
            value, reason = None, f"raised {describe(error, getattr(function, '__code__', None) and _file(function))}"
        return value if reason is None else FailedScore(reason)

    return compute_score


def _file(function: Callable) -> str:
    return function.__code__.co_filename


def failure_of(result: dict[str, Any]) -> str | None:
    """Why the ``result`` of a reward manager is that of a failed call, or None."""
    extra = result.get("reward_extra_info") or {}
    for value in (result.get("reward_score"), *extra.values()):
        if isinstance(value, FailedScore):
            return value.reason
    if extra.get("timeout") is True:  # verl's rate-limited manager catches what a function raises and scores 0
        return "took longer than reward.timeout"
    if isinstance(extra.get("error"), str) and result.get("reward_score") == 0.0 and extra.get("acc") == 0.0:
        return f"raised {extra['error']}"
    return normalise(result.get("reward_score"))[1]


def all_failed(calls: int, causes: list[str]) -> str:
    """The message for a batch in which no reward call worked."""
    return explain(
        "every reward call of the batch failed, so there is nothing to learn from",
        found=f"{calls} of {calls} calls: " + "; ".join(causes),
        fix="mend the reward function; `verl-fl doctor` and a call by hand show the same error",
    )
