"""The attention and mask functions the engine registers with transformers.

Any model that goes through transformers' attention interface then runs over the slot cache: the model's own modules
compute queries, keys and values; masks come from the model's own mask rule (causal, sliding window, chunks, ...),
evaluated at each row's own position. Shapes: N rows, H query heads, K key/value heads, Q query and L key positions,
D head dims.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "verl_fl_native"
"""The `attn_implementation` of a served model."""

# Arguments that change the result and that this attention does not implement.
_UNSUPPORTED = ("s_aux", "position_bias", "alibi")


class _Step(threading.local):
    """What the mask function needs and transformers does not hand it: one value a thread, so engines do not meet."""

    positions: torch.Tensor | None = None
    """[N] position of each row's single query in a decode step; None in a prefill, whose queries start at 0."""


step = _Step()


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable = causal_mask_function,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor | None:
    """Additive mask [N or 1, 1, Q, L], or None where plain causal attention over the new tokens is meant."""
    plain = mask_function is causal_mask_function or (local_size is not None and local_size >= kv_length)
    if step.positions is None:
        if plain and allow_is_causal_skip:
            return None
        queries = torch.arange(q_length, device=device).view(1, 1, -1, 1)
    else:
        queries = step.positions.view(-1, 1, 1, 1)
    rows = torch.arange(batch_size, device=device).view(-1, 1, 1, 1)
    keys = torch.arange(kv_length, device=device).view(1, 1, 1, -1)
    allowed = mask_function(rows, torch.zeros(1, dtype=torch.long, device=device), queries, keys)
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, torch.finfo(dtype).min)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of query [N, H, Q, D] over key and value [N, K, L, D]; returns [N, Q, H, D]."""
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"the attention argument {name!r} of {type(module).__name__}")
    n, heads, q_len, _ = query.shape
    group = heads // key.shape[1]
    if softcap is not None:
        out = _softcapped(query, key, value, attention_mask, scaling, softcap)
    elif q_len == 1 and attention_mask is not None:
        # The queries of a group share their keys: as extra query rows they need no copy of them (enable_gqa makes one).
        folded = query.reshape(n, -1, group, query.shape[-1])
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(n, 1, heads, -1), None
    else:
        out = F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, dim=1) if group > 1 else key,
            value.repeat_interleave(group, dim=1) if group > 1 else value,
            attn_mask=attention_mask,
            is_causal=attention_mask is None and q_len > 1,
            scale=scaling,
        )
    return out.transpose(1, 2), None


def _softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Attention with tanh-capped scores (Gemma 2), which no fused kernel offers; returns [N, H, Q, D]."""
    n, heads, q_len, dim = query.shape
    folded = query.reshape(n, key.shape[1], -1, dim)
    scores = folded @ key.transpose(2, 3) * (dim**-0.5 if scaling is None else scaling)
    scores = (torch.tanh(scores / softcap) * softcap).view(n, heads, q_len, -1)
    if mask is None:
        mask = torch.full((q_len, q_len), torch.finfo(scores.dtype).min, device=scores.device).triu(1)
    weights = torch.softmax((scores + mask).float(), dim=-1).to(query.dtype)
    return (weights.view(n, key.shape[1], -1, weights.shape[-1]) @ value).view(n, heads, q_len, -1)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
