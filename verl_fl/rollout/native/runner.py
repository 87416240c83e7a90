"""Runs a Hugging Face causal LM over the slot cache: prefill of whole prompts, decode of one token a row."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from verl_fl.rollout.native import attention
from verl_fl.rollout.native.cache import LayerShape, ShapeProbe, SlotCache

# On CPU a prefill runs in pieces whose activations stay in the caches; sorted by length, pieces also pad less.
_CPU_CHUNK_TOKENS = 1024


class ModelRunner:
    """Owns the forward passes of one model. Construction takes the model over: attention, grad mode, eval mode.

    Raises ValueError where the model cannot be served, with what it lacks.
    """

    def __init__(self, model: Any, *, budget_bytes: int) -> None:
        # Any: torch's stubs say that what a module has beyond its own methods is a tensor.
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self._chunk = _CPU_CHUNK_TOKENS if self.device.type == "cpu" else sys.maxsize
        model.requires_grad_(False).eval()
        self._last: torch.Tensor | None = None
        _check_interface(model)
        model.set_attn_implementation(attention.NAME)
        # Only the last position of each row needs logits; selecting in front of the output head keeps what a model
        # does after it (soft caps, scales) intact.
        model.get_output_embeddings().register_forward_pre_hook(self._select_last)
        shapes = self._probe()
        dtype = model.get_input_embeddings().weight.dtype
        self.cache = SlotCache(shapes, dtype=dtype, device=self.device, budget_bytes=budget_bytes)

    def prefill(self, prompts: Sequence[Sequence[int]], first_slot: int) -> torch.Tensor:
        """Logits [N, V] after each prompt; its keys and values lie in slot first_slot + i. Best sorted by length."""
        logits, start = [], 0
        while start < len(prompts):
            end = start + 1
            while end < len(prompts) and max(map(len, prompts[start : end + 1])) * (end + 1 - start) <= self._chunk:
                end += 1
            logits.append(self._prefill_chunk(prompts[start:end], first_slot + start))
            start = end
        return torch.cat(logits)

    def _prefill_chunk(self, prompts: Sequence[Sequence[int]], first_slot: int) -> torch.Tensor:
        longest = max(map(len, prompts))
        # Padded on the right: causal attention never looks there, and each slot starts at position 0.
        ids = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=self.device)
        self._last = torch.tensor([len(p) - 1 for p in prompts], device=self.device)
        self.cache.begin_prefill(first_slot, len(prompts))
        positions = torch.arange(longest, device=self.device).expand(len(prompts), -1)
        return self._forward(ids, positions, self.cache, None)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """Logits [N, V] after feeding tokens [N] at positions [N] of slots 0 .. N-1; longest = max position + 1."""
        self._last = None
        self.cache.begin_decode(positions, longest)
        return self._forward(tokens.unsqueeze(1), positions.unsqueeze(1), self.cache, positions)

    def _forward(self, ids, positions, cache, decode_positions) -> torch.Tensor:
        attention.step.positions = decode_positions
        out = self.model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        return out.logits[:, 0]

    def _select_last(self, module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        if self._last is None:
            return None
        hidden = args[0]
        return (hidden[torch.arange(hidden.shape[0], device=hidden.device), self._last].unsqueeze(1),)

    @torch.inference_mode()
    def _probe(self) -> list[LayerShape]:
        """What each layer caches, seen in one forward pass of two tokens; ValueError if the pass cannot work."""
        probe, ids = ShapeProbe(), torch.zeros(1, 2, dtype=torch.long, device=self.device)
        self._last = torch.ones(1, dtype=torch.long, device=self.device)
        try:
            self._forward(ids, torch.arange(2, device=self.device).unsqueeze(0), probe, None)
        except (NotImplementedError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise _cannot_serve(self.model, f"a trial forward pass failed: {error}") from error
        layers = getattr(self.model.config.get_text_config(), "num_hidden_layers", len(probe.shapes))
        if sorted(probe.shapes) != list(range(layers)):
            raise _cannot_serve(
                self.model, f"of {layers} layers only {sorted(probe.shapes)} keep keys and values in the cache"
            )
        return [probe.shapes[i] for i in range(layers)]


def _check_interface(model: Any) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise _cannot_serve(model, "it is an encoder-decoder model")
    if not getattr(model, "_supports_attention_backend", False):
        raise _cannot_serve(model, "it does not use transformers' attention interface")
    if model.get_output_embeddings() is None:
        raise _cannot_serve(model, "it has no output head (get_output_embeddings() is None)")


def _cannot_serve(model: torch.nn.Module, found: str) -> ValueError:
    return ValueError(
        f"the native rollout engine cannot serve {type(model).__name__}: {found}. Legal are decoder-only causal LMs of "
        "transformers whose every layer is attention through the attention interface (Llama, Qwen, Gemma, Phi, ...). "
        "Use another rollout engine for this model (rollout.name=vllm or sglang)."
    )
