"""What a request may ask of the sampler, and the sampler itself.

Shapes: N rows of a batch, V vocabulary entries, K candidates kept by a filter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

# Summing blocks first keeps the running sums short (fp32 over 150k entries drifts) and never writes an [N, V] cumsum.
_BLOCK = 256
# Filters look at this many candidates first; a full sort happens only where the kept set may be larger.
_FIRST_CANDIDATES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled. Raises ValueError for a value out of bounds."""

    max_tokens: int
    """Tokens to generate at most, at least 1."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 is off."""
    top_k: int = -1
    """Keep this many tokens; -1 or 0 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides (multiplies, if negative) the logits of tokens seen in prompt or output; 1 is off."""
    stop: tuple[str, ...] = ()
    """Finish as soon as the generated text contains one of these."""
    stop_token_ids: tuple[int, ...] = ()
    """Finish on one of these tokens (which is part of the output)."""
    ignore_eos: bool = False
    """Do not finish on the model's end tokens."""
    min_tokens: int = 0
    """No end or stop token, and no stop string, before this many tokens."""
    seed: int | None = None
    """Same seed, same tokens, whatever else is in the batch."""
    logprobs: bool = False
    """Return log_softmax(logits / temperature) of each sampled token (temperature 1 where greedy)."""

    def __post_init__(self) -> None:
        legal = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1"),
            "top_k": (self.top_k >= -1, "-1 or 0 (off), or a positive number"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0"),
            "min_tokens": (0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens ({self.max_tokens})"),
            "stop": (all(self.stop), "strings that are not empty"),
        }
        for name, (holds, wanted) in legal.items():
            if not holds:
                raise ValueError(
                    f"sampling parameter {name}={getattr(self, name)!r}: legal is {wanted}. Change it in the request."
                )

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], *, default_max_tokens: int) -> SamplingParams:
        """Parameters from a verl or vLLM style mapping. None means the default; `max_new_tokens` is an alias.

        Raises ValueError for an unknown key, for n other than 1, and for values out of bounds.
        """
        known = {f.name for f in fields(cls)}
        values = {("max_tokens" if k == "max_new_tokens" else k): v for k, v in d.items() if v is not None}
        n = values.pop("n", 1)
        if n != 1:
            raise ValueError(f"sampling parameter n={n!r}: legal is 1. Send one request per sample.")
        if unknown := sorted(set(values) - known):
            raise ValueError(
                f"unknown sampling parameter {', '.join(map(repr, unknown))} in {sorted(d)}: legal are "
                f"{', '.join(sorted(known | {'max_new_tokens', 'n'}))}. Remove it, or correct its name."
            )
        values.setdefault("max_tokens", default_max_tokens)
        stop = values.get("stop", ())
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        values["stop_token_ids"] = tuple(int(t) for t in values.get("stop_token_ids", ()))
        # vLLM counts alternatives here (0 = only the sampled token); any of them asks for the sampled token's.
        logprobs = values.get("logprobs", False)
        values["logprobs"] = logprobs is not False
        return cls(**values)

    @property
    def filtered(self) -> bool:
        """Whether a filter applies (a greedy row needs none: they all keep the likeliest token)."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


class BatchSampler:
    """Samples one token a row for a fixed set of requests; build a new one when the set changes."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        def column(values: list, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        def index(flags: list[bool]) -> torch.Tensor:
            return torch.tensor([i for i, flag in enumerate(flags) if flag], dtype=torch.long, device=device)

        self._device = device
        self._greedy = index([p.temperature == 0 for p in params])
        self._filtered = index([p.filtered for p in params])
        self._all_greedy = len(self._greedy) == len(params)
        self._logprobs = any(p.logprobs for p in params)
        self._temperature = None
        if any(p.temperature not in (0, 1) for p in params):
            self._temperature = column([p.temperature or 1.0 for p in params])
        wanted = [p for p in params if p.filtered]
        self._top_k = column([p.top_k if p.top_k > 0 else 0 for p in wanted], torch.long)
        self._top_p = column([p.top_p for p in wanted])
        self._min_p = column([p.min_p for p in wanted]).log()

    def __call__(
        self, logits: torch.Tensor, uniforms: Sequence[float], adjusted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids [N] and, where some row asks for them, fp32 log-probabilities [N].

        logits [N, V] are the model's; adjusted, where given, the same after penalties, before temperature: tokens are
        drawn from adjusted, log-probabilities are of logits. uniforms: N numbers in [0, 1).
        """
        tempered = self._tempered(logits)
        drawn_from = tempered if adjusted is None else self._tempered(adjusted)
        scale = _Scale(tempered) if self._logprobs or (adjusted is None and not self._all_greedy) else None
        if self._all_greedy:
            tokens = drawn_from.argmax(dim=-1)
        else:
            u = torch.tensor(uniforms, dtype=torch.float64, device=self._device).unsqueeze(1)
            tokens = draw(scale.weights if scale is not None and adjusted is None else _Scale(drawn_from).weights, u)
            if len(rows := self._filtered):
                limits = self._top_k, self._top_p, self._min_p
                tokens[rows] = draw_filtered(drawn_from[rows], *limits, u[rows])
            if len(rows := self._greedy):
                tokens[rows] = drawn_from[rows].argmax(dim=-1)
        return tokens, scale.log_probs(tempered, tokens) if self._logprobs and scale is not None else None

    def _tempered(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        return logits if self._temperature is None else logits / self._temperature


class _Scale:
    """exp(logits - max) [N, V]: the probabilities but for a factor a row, in a fraction of softmax's time on CPU."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._top = logits.amax(-1, keepdim=True)
        self.weights = torch.sub(logits, self._top).exp_()

    def log_probs(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """log_softmax(logits) at tokens [N]."""
        return logits.gather(1, tokens.unsqueeze(1)).sub_(self._top).squeeze(1) - self.weights.sum(-1).log_()


def draw(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw: token ids [N] from probs [N, V] (need not sum to 1) with u [N, 1] fp64 in [0, 1).

    Never returns a token of probability zero. torch.multinomial gives the same law at 10 to 50 times the cost on CPU.
    """
    n, vocab = probs.shape
    whole = vocab // _BLOCK * _BLOCK
    sums = probs[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1) if whole else probs.new_empty(n, 0)
    if whole < vocab:
        sums = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True)], dim=1)
    block, rest = _pick(sums.double(), u)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(1, columns.clamp(max=vocab - 1)).double().masked_fill_(columns >= vocab, 0.0)
    return (block * _BLOCK + _pick(inside, rest)[0]).squeeze(1)


def _pick(weights: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index [N, 1] drawn from fp64 weights [N, K] by u [N, 1], and the fraction of that entry that u used up."""
    cdf = weights.cumsum(-1)
    total = cdf[:, -1:]
    # Strictly below the total, so that the first entry above the target exists and has weight: zero entries never win.
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, index)
    used = (target - (cdf.gather(1, index) - weight)) / weight
    return index, used.clamp_(0.0, 1.0)


def draw_filtered(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, log_min_p: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    """Token ids [N] drawn after top-k, then top-p among those, then min-p.

    logits [N, V] fp32, already tempered; the limits are [N, 1], off at top_k 0, top_p 1, log_min_p -inf.
    """
    vocab = logits.shape[1]
    bounded = bool((top_k > 0).all())
    size = min(int(top_k.max()), vocab) if bounded else min(_FIRST_CANDIDATES, vocab)
    whole = None if bounded else logits.logsumexp(-1, keepdim=True)
    while True:
        values, ids = logits.topk(size, dim=-1)
        rank = torch.arange(size, device=logits.device)
        inside = (rank < top_k) | (top_k == 0)
        mass = values.masked_fill(~inside, -math.inf).logsumexp(-1, keepdim=True)
        if whole is not None:
            mass = torch.where(top_k > 0, mass, whole)
        p = (values - mass).exp()
        keep = inside & ((p.cumsum(-1) - p < top_p) | (top_p >= 1)) & (values >= values[:, :1] + log_min_p)
        # The last candidate is kept: there may be more to keep beyond it.
        if bounded or size == vocab or not bool(keep[:, -1].any()):
            rank_drawn, _ = _pick(p.double().masked_fill_(~keep, 0.0), u)
            return ids.gather(1, rank_drawn).squeeze(1)
        size = vocab


def penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Repetition penalty as Hugging Face defines it: logits [N, V] fp32, seen [N, V] bool, penalty [N, 1]."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
