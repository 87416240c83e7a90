"""Attention for training on a CPU: torch's sdpa, except for short rows, where its backward pass is many times slower
than the two matrix products it stands for (benchmarks/attention.py).

Shapes: B rows, H query heads, K key/value heads, G = H / K, S queries, L keys, D head dims.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "verl_fl_sdpa"
"""The ``attn_implementation`` that stands in for ``sdpa`` in CPU engines."""

SHORT = 256
"""Longest row, in tokens, for which the scores are computed as they are written."""


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of ``query`` [B, H, S, D] over ``key`` and ``value`` [B, K, L, D]; returns [B, S, H, D].

    ``attention_mask`` is [B or 1, 1, S, L], bool (True is seen) or additive; None with S > 1 is causal.
    """
    plain = dropout == 0.0 and not any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias"))
    if not plain or max(query.shape[2], key.shape[2]) > SHORT:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return folded(query, key, value, attention_mask, scaling, bool(causal)).transpose(1, 2), None


def folded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    causal: bool,
) -> torch.Tensor:
    """softmax(q k^T) v with the query heads of a group as further rows, so that keys and values are never repeated.

    A query that may see no key gets the mean of all values, finite, as sdpa's masked kernel gives finite numbers.
    """
    rows, heads, queries, dim = query.shape
    groups = key.shape[1]
    scale = dim**-0.5 if scaling is None else scaling
    scores = (query * scale).reshape(rows, groups, -1, dim) @ key.transpose(2, 3)
    scores = scores.view(rows, groups, heads // groups, queries, -1)
    if mask is None and causal and queries > 1:
        mask = torch.ones(queries, scores.shape[-1], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is not None:
        mask = mask[:, :, None, :, : scores.shape[-1]]
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype is torch.bool else scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return (weights.view(rows, groups, -1, weights.shape[-1]) @ value).view(rows, heads, queries, -1)


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
