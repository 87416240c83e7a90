"""The key/value cache: one slot a running request, written in place, no copies per step.

Each layer holds two tensors [slots, kv_heads, capacity, head_dim]; a request's tokens lie at the start of its slot.
Head-major, so that attention reads each head's tokens in one run of memory, which is what its time is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

_ROUND_TOKENS = 64


class _AttentionOnlyCache(Cache):
    """Base of both caches here: answers transformers' questions for attention layers, refuses recurrent state."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("a convolution state beside the keys and values (a Mamba-type layer)")

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("a recurrent state beside the keys and values (a linear-attention layer)")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Per token and layer: keys are [kv_heads, key_dim], values [kv_heads, value_dim]."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


class ShapeProbe(_AttentionOnlyCache):
    """Records what each layer caches, during one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes[layer_idx] = LayerShape(key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        return key_states, value_states


class SlotCache(_AttentionOnlyCache):
    """Keys and values of the running requests, slots 0 .. N-1 in batch order. Memory bounded by budget_bytes."""

    def __init__(
        self, shapes: Sequence[LayerShape], *, dtype: torch.dtype, device: torch.device, budget_bytes: int
    ) -> None:
        super().__init__()
        self.shapes, self.dtype, self.device = list(shapes), dtype, device
        self.bytes_per_token = sum(s.elements for s in self.shapes) * dtype.itemsize
        self.budget_tokens = budget_bytes // max(1, self.bytes_per_token)
        self.free()

    def free(self) -> None:
        """Drop all contents and memory."""
        self.slots = self.capacity = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._prefill_rows: slice | None = None
        self._decode_index: dict[int, torch.Tensor] = {}
        self._decode_shape = (0, 0)

    def fits(self, slots: int, tokens: int) -> bool:
        """Whether slots requests of up to tokens tokens each fit the budget."""
        return slots * tokens <= self.budget_tokens

    def reserve(self, slots: int, tokens: int, *, used_slots: int, used_tokens: int) -> None:
        """Make room for slots x tokens, keeping the first used_slots x used_tokens. Grows by doubling where that fits.

        The caller has checked `fits(slots, tokens)`.
        """
        if slots <= self.slots and tokens <= self.capacity:
            return
        assert self.fits(slots, tokens)
        rounded = -(-max(tokens, 1) // _ROUND_TOKENS) * _ROUND_TOKENS
        wide = self.slots if slots <= self.slots else max(slots, 2 * self.slots)
        long = self.capacity if tokens <= self.capacity else max(rounded, 2 * self.capacity)
        choices = [(wide, long), (slots, long), (wide, rounded), (slots, rounded), (slots, tokens)]
        self.slots, self.capacity = next(c for c in choices if self.fits(*c))
        old_keys, old_values = self.keys, self.values
        self.keys, self.values = [], []
        try:
            self._grow(old_keys, old_values, used_slots, used_tokens)
        except BaseException:  # out of memory half-way: an empty cache is whole, half a one is not
            self.free()
            raise

    def _grow(
        self, old_keys: list[torch.Tensor], old_values: list[torch.Tensor], used_slots: int, used_tokens: int
    ) -> None:
        for i, shape in enumerate(self.shapes):
            # Zeros, not empty: masked positions still enter the product with the values; a stray NaN would spread.
            for new, old, dim in ((self.keys, old_keys, shape.key_dim), (self.values, old_values, shape.value_dim)):
                size = (self.slots, shape.kv_heads, self.capacity, dim)
                new.append(torch.zeros(size, dtype=self.dtype, device=self.device))
                if old:
                    # Popped: one layer is held twice at a time, not all of them.
                    new[i][:used_slots, :, :used_tokens] = old.pop(0)[:used_slots, :, :used_tokens]

    def copy_slot(self, source: int, targets: Sequence[int], tokens: int) -> None:
        """Copy the first tokens positions of one slot to others."""
        index = torch.tensor(targets, device=self.device)
        for tensor in (*self.keys, *self.values):
            tensor[index, :, :tokens] = tensor[source, :, :tokens].clone()  # one storage: torch refuses it as it stands

    def begin_prefill(self, first_slot: int, rows: int) -> None:
        """The next forward pass writes rows whole prompts, from position 0, to slots first_slot onwards."""
        self._prefill_rows = slice(first_slot, first_slot + rows)

    def begin_decode(self, positions: torch.Tensor, longest: int) -> None:
        """The next forward pass writes one token a slot at positions [N] (int64), all below longest."""
        self._prefill_rows = None
        self._decode_shape = (positions.shape[0], longest)
        slots = torch.arange(positions.shape[0], device=self.device)
        self._decode_index = {}
        for heads in {shape.kv_heads for shape in self.shapes}:
            rows = slots.unsqueeze(1) * heads + torch.arange(heads, device=self.device)
            self._decode_index[heads] = (rows * self.capacity + positions.unsqueeze(1)).flatten()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [N, K, Q, D]; return what the queries may see, [N, K, L, D]."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self._prefill_rows is not None:
            length = key_states.shape[2]
            keys[self._prefill_rows, :, :length] = key_states
            values[self._prefill_rows, :, :length] = value_states
            return key_states, value_states
        rows, longest = self._decode_shape
        index = self._decode_index[key_states.shape[1]]
        keys.flatten(0, 2).index_copy_(0, index, key_states.flatten(0, 2))
        values.flatten(0, 2).index_copy_(0, index, value_states.flatten(0, 2))
        return keys[:rows, :, :longest], values[:rows, :, :longest]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._prefill_rows is not None else self._decode_shape[1] - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return (query_length if self._prefill_rows is not None else self._decode_shape[1]), 0
