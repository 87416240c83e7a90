"""What is asked of the rollout engine, and what comes back."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

import torch

from verl_fl.rollout.native._stop import StopStrings
from verl_fl.rollout.native.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """The end of one request."""

    request_id: str
    token_ids: list[int]
    """Generated tokens, the end or stop token included."""
    log_probs: list[float] | None
    """One a token, where the request asked for them."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The token or string that stopped it."""
    num_preempted: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were copied from another request instead of computed."""
    weight_version_min: int | None = None
    weight_version_max: int | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """A request in flight: what was asked and what was generated so far."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    num_preempted: int = 0
    num_cached_tokens: int = 0
    weight_versions: list[int] = field(default_factory=list)
    rng: random.Random = field(default_factory=random.Random)
    stop_strings: StopStrings | None = None
    seen: torch.Tensor | None = None
    """[V] bool, tokens in prompt or output; only with a repetition penalty."""
    num_stored: int = 0
    """Tokens whose keys and values are in the cache: all but the last one while running, 0 while waiting."""
    arrival: int = 0

    def all_ids(self) -> list[int]:
        return self.prompt_ids + self.token_ids

    def seen_tokens(self, vocab: int, device: torch.device) -> torch.Tensor:
        """`seen`, made of the tokens so far where it is not there yet."""
        if self.seen is None:
            self.seen = torch.zeros(vocab, dtype=torch.bool, device=device)
            self.seen[torch.tensor(self.all_ids(), device=device)] = True
        return self.seen

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    def output(self, finish_reason: FinishReason, stop_reason: int | str | None = None) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            token_ids=self.token_ids,
            log_probs=self.log_probs if self.params.logprobs else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_preempted=self.num_preempted,
            num_cached_tokens=self.num_cached_tokens,
            weight_version_min=min(self.weight_versions, default=None),
            weight_version_max=max(self.weight_versions, default=None),
        )
