"""A decode step of Llama-shaped models on CPU in a third of the operators: what transformers' modules compute, written
out over the packed linears, with activations and residuals inside the products.

Shapes: N rows, one token each; C hidden, H query heads, K key/value heads, D head dims, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from verl_fl.rollout.native._linear import PackedLinears
from verl_fl.rollout.native.cache import SlotCache

_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def fast_decoder(model: Any, cache: SlotCache, packed: PackedLinears) -> FastDecoder | None:
    """A decoder for the model, if this file writes out its modules: known by class, full attention, SiLU, on CPU."""
    config = model.config
    known = type(model).__name__ in _CLASSES and type(model).__module__.startswith("transformers.models.")
    if not known or model.lm_head not in packed or config.hidden_act != "silu":
        return None
    windowed = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if windowed or (type(model).__name__ == "MistralForCausalLM" and config.sliding_window is not None):
        return None
    return FastDecoder(model, cache, packed)


class FastDecoder:
    """Decode steps over the slot cache; the prefill stays with the model's own forward."""

    def __init__(self, model: Any, cache: SlotCache, packed: PackedLinears) -> None:
        self._body, self._cache, self._packed = model.model, cache, packed
        self._head = model.lm_head
        attention = self._body.layers[0].self_attn
        self._dim, self._scale = attention.head_dim, attention.scaling
        self._norms: dict[Any, torch.Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        """Follow a change of weights."""
        self._norms.clear()

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """Logits [N, V] after feeding tokens [N] at positions [N] of slots 0 .. N-1."""
        cache, linear = self._cache, self._packed.product
        cache.begin_decode(positions, longest)
        hidden = self._body.embed_tokens(tokens)
        cos, sin = self._rotation(hidden, positions)
        mask = torch.zeros(positions.shape[0], 1, 1, longest, dtype=hidden.dtype)
        mask.masked_fill_(torch.arange(longest) > positions.view(-1, 1, 1, 1), torch.finfo(hidden.dtype).min)
        for index, layer in enumerate(self._body.layers):
            x = self._norm(layer.input_layernorm, hidden)
            x = self._attend(layer.self_attn, index, x, cos, sin, mask)
            hidden = linear(layer.self_attn.o_proj, x, hidden, "add")
            x = self._norm(layer.post_attention_layernorm, hidden)
            gate = linear(layer.mlp.gate_proj, x, activation="swish")
            hidden = linear(layer.mlp.down_proj, linear(layer.mlp.up_proj, x, gate, "mul"), hidden, "add")
        return linear(self._head, self._norm(self._body.norm, hidden))

    def _attend(
        self, attention: Any, index: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        rows, dim = x.shape[0], self._dim
        merged = self._packed.shared_product(attention.q_proj, x).view(rows, -1, dim)
        groups = self._cache.shapes[index].kv_heads
        rotated, value = merged[:, :-groups], merged[:, -groups:]
        if getattr(attention, "q_norm", None) is not None:
            query, key = rotated[:, :-groups], rotated[:, -groups:]
            rotated = torch.cat([self._norm(attention.q_norm, query), self._norm(attention.k_norm, key)], 1)
        # Rolling by half a head swaps the halves; the sign that a rotation needs stands in sin.
        rotated = torch.addcmul(rotated * cos, rotated.roll(dim // 2, -1), sin)
        query, key = rotated[:, :-groups], rotated[:, -groups:]
        keys, values = self._cache.update(key.unsqueeze(2), value.unsqueeze(2), index)
        folded = query.reshape(rows, groups, -1, dim)
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=self._scale).view(rows, -1)

    def _rotation(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._body.rotary_emb(hidden, positions.unsqueeze(0))  # [1, N, D]
        half = self._dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)

    def _norm(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        """RMS norm by torch's fused layer norm: beside its negative, a row has mean 0 and variance mean(x^2)."""
        weight = self._norms.get(norm)
        if weight is None:
            weight = self._norms[norm] = torch.cat([norm.weight, torch.zeros_like(norm.weight)])
        doubled = torch.cat([x, -x], -1)
        return F.layer_norm(doubled, weight.shape, weight, None, norm.variance_epsilon)[..., : x.shape[-1]]
