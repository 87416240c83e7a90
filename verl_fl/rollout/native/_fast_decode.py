"""A decode step of Llama-shaped models on CPU: packed products with activations and residuals inside them, and C
kernels for all between. Computes what transformers' modules compute; the prefill stays with those.

Shapes: N rows, one token each; C hidden, H query heads, K key/value heads, D head dims, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from verl_fl.rollout.native._kernels import Kernels, kernels
from verl_fl.rollout.native._linear import PackedLinears
from verl_fl.rollout.native.cache import SlotCache

_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def fast_decoder(model: Any, cache: SlotCache, packed: PackedLinears) -> FastDecoder | None:
    """A decoder for the model, if this file writes out its modules (known by class; full attention, SiLU) and the
    kernels compile; None otherwise."""
    config = model.config
    known = type(model).__name__ in _CLASSES and type(model).__module__.startswith("transformers.models.")
    if not known or model.lm_head not in packed or config.hidden_act != "silu":
        return None
    windowed = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if windowed or (type(model).__name__ == "MistralForCausalLM" and config.sliding_window is not None):
        return None
    compiled = kernels(cache.dtype)
    return None if compiled is None else FastDecoder(model, cache, packed, compiled)


class FastDecoder:
    """Decode steps over the slot cache."""

    def __init__(self, model: Any, cache: SlotCache, packed: PackedLinears, compiled: Kernels) -> None:
        self._body, self._head = model.model, model.lm_head
        self._cache, self._packed, self._call = cache, packed, compiled.call
        attention = self._body.layers[0].self_attn
        self._dim, self._scale = attention.head_dim, float(attention.scaling)
        self._heads = model.config.num_attention_heads
        self._scratch = torch.empty(0, dtype=torch.float32)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """Logits [N, V] after feeding tokens [N] at positions [N] (int64) of slots 0 .. N-1."""
        linear = self._packed.product
        hidden = self._body.embed_tokens(tokens)
        cos, sin = (part[0].contiguous() for part in self._body.rotary_emb(hidden, positions.unsqueeze(0)))
        self._reserve_scratch(len(positions))
        for index, layer in enumerate(self._body.layers):
            x = self._norm(layer.input_layernorm, hidden)
            x = self._attend(layer.self_attn, index, x, cos, sin, positions)
            hidden = linear(layer.self_attn.o_proj, x, hidden, "add")
            x = self._norm(layer.post_attention_layernorm, hidden)
            gate = linear(layer.mlp.gate_proj, x, activation="swish")
            hidden = linear(layer.mlp.down_proj, linear(layer.mlp.up_proj, x, gate, "mul"), hidden, "add")
        return linear(self._head, self._norm(self._body.norm, hidden))

    def _attend(self, attention: Any, index: int, x: Any, cos: Any, sin: Any, positions: torch.Tensor) -> torch.Tensor:
        cache, rows, dim = self._cache, x.shape[0], self._dim
        groups = cache.shapes[index].kv_heads
        merged = self._packed.product(attention.q_proj, x)  # q, k and v side by side
        query = x.new_empty(rows, self._heads * dim)
        q_norm: Any = getattr(attention, "q_norm", None)
        k_norm: Any = getattr(attention, "k_norm", None)
        norms = (None, None, 0.0) if q_norm is None else (q_norm.weight, k_norm.weight, float(q_norm.variance_epsilon))
        keys, values = cache.keys[index], cache.values[index]
        sizes = (self._heads, groups, dim, cache.capacity)
        self._call("rotate_and_store", merged, *norms, cos, sin, positions, query, keys, values, rows, *sizes)
        out = torch.empty_like(query)
        shape = (rows, groups, self._heads // groups, dim, cache.capacity)
        self._call("attend", query, keys, values, positions, out, self._scratch, *shape, self._scale)
        return out

    def _norm(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._call("rms_norm", x, norm.weight, out, x.shape[0], x.shape[1], float(norm.variance_epsilon))
        return out

    def _reserve_scratch(self, rows: int) -> None:
        needed = rows * self._heads * (self._cache.capacity + 2 * self._dim)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.float32)
