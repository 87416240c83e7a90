"""Sets of named tensors, made from a model's config with random values, and the digest that judges every transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Tensors = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Payload:
    """A Llama-like model: what Hugging Face's names and shapes of its tensors follow from."""

    name: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    """Whether ``lm_head.weight`` is the embedding itself, as a second name of one storage."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that has a storage of its own, in the order of the model's state."""
        head_dim = self.hidden // self.heads
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            sizes = {
                "self_attn.q_proj": (self.hidden, self.hidden),
                "self_attn.k_proj": (self.kv_heads * head_dim, self.hidden),
                "self_attn.v_proj": (self.kv_heads * head_dim, self.hidden),
                "self_attn.o_proj": (self.hidden, self.hidden),
                "mlp.gate_proj": (self.intermediate, self.hidden),
                "mlp.up_proj": (self.intermediate, self.hidden),
                "mlp.down_proj": (self.hidden, self.intermediate),
                "input_layernorm": (self.hidden,),
                "post_attention_layernorm": (self.hidden,),
            }
            shapes.update({f"model.layers.{layer}.{name}.weight": size for name, size in sizes.items()})
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes

    @property
    def size_bytes(self) -> int:
        """Of all storages, in bfloat16; a tied head counts once."""
        import math

        return sum(math.prod(shape) for shape in self.shapes().values()) * 2


PAYLOADS = {
    payload.name: payload
    for payload in (
        Payload(
            name="smollm2",
            vocab=49152,
            hidden=576,
            intermediate=1536,
            layers=30,
            heads=9,
            kv_heads=3,
            tied=True,
        ),
        Payload(
            name="llama-2gb",
            vocab=32000,
            hidden=2048,
            intermediate=5632,
            layers=20,
            heads=32,
            kv_heads=4,
            tied=False,
        ),
        Payload(
            name="small",
            vocab=1031,
            hidden=96,
            intermediate=256,
            layers=3,
            heads=3,
            kv_heads=1,
            tied=True,
        ),
    )
}


def make(payload: Payload, seed: int | None) -> Tensors:
    """The payload's named tensors in bfloat16 on the CPU: random (the sender's), or zeros where the seed is None."""
    import torch

    generator = torch.Generator().manual_seed(seed or 0)
    tensors: Tensors = {}
    for name, shape in payload.shapes().items():
        tensor = torch.zeros(shape, dtype=torch.bfloat16)  # touched, so that no page fault falls into a measurement
        if seed is not None:
            tensor.normal_(0, 0.04, generator=generator)
        tensors[name] = tensor
    if payload.tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def load(payload: Payload, path: str) -> tuple[Tensors, list[Any]]:
    """The same tensors with a real model's values, from a Hugging Face folder or a .gguf file; and the values in fp32,
    which a quantized file has more of than bfloat16 holds.

    Raises:
        ValueError: the model has other names or shapes than the payload.
    """
    import threading

    import _common
    import torch
    import tqdm

    tqdm.tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a worker's quick end would leak
    masters = {name: value.detach().clone() for name, value in _common.load_model(path, "float32").named_parameters()}
    empty = torch.empty(0)
    wrong = [name for name, shape in payload.shapes().items() if tuple(masters.get(name, empty).shape) != shape]
    if wrong:
        raise ValueError(f"--model {path!r} is no {payload.name}: {wrong[:3]} missing or of another shape")
    tensors = {name: masters[name].bfloat16() for name in payload.shapes()}
    if payload.tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors, [masters[name] for name in payload.shapes()]


def storages(tensors: Tensors) -> list[Any]:
    """Flat uint8 views, one a storage: what a rival has to carry (a tied head is spared it)."""
    import torch

    views, seen = [], set()
    for tensor in tensors.values():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            views.append(tensor.view(-1).view(torch.uint8))
    return views


def buffers(tensors: Tensors) -> list[memoryview]:
    """The same as writable buffers for sockets."""
    return [memoryview(view.numpy()) for view in storages(tensors)]


def change(tensors: Tensors, version: int) -> None:
    """Every value becomes another, so that a transfer that left old bytes anywhere shows in the digest."""
    import torch

    mask = (version * 40503 & 0x7FFF) | 1
    for view in storages(tensors):
        view.view(torch.int16).bitwise_xor_(mask)


def digest(tensors: Tensors) -> str:
    """xxh3-128 over all names and bytes."""
    import xxhash

    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        state.update(name.encode())
        state.update(memoryview(buffers({name: tensors[name]})[0]))
    return state.hexdigest()


class AdamW:
    """Real optimizer steps: fp32 master weights, dense random gradients, the result rounded to the tensors.

    Args:
        masters: in the order of the storages; none: the tensors' own values.
    """

    def __init__(self, tensors: Tensors, masters: list[Any], lr: float) -> None:
        import torch

        self.tensors = list({tensor.data_ptr(): tensor for tensor in tensors.values()}.values())
        self.masters = [value.requires_grad_() for value in masters or [tensor.float() for tensor in self.tensors]]
        self.generator = torch.Generator().manual_seed(1)
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr)
        self.other: list[Any] = []

    def step(self) -> float:
        """One step further; returns the share of the bfloat16 values that changed."""
        import torch

        for master in self.masters:
            master.grad = torch.randn(master.shape, generator=self.generator)
        self.optimizer.step()
        self.other = [tensor.clone() for tensor in self.tensors]
        with torch.no_grad():
            for tensor, master in zip(self.tensors, self.masters, strict=True):
                tensor.copy_(master)
                master.grad = None
        changed = sum(int((old != new).sum()) for old, new in zip(self.other, self.tensors, strict=True))
        return changed / sum(tensor.numel() for tensor in self.tensors)

    def toggle(self) -> None:
        """Between the values before the last step and those after it: the same changes again, for repeated timing."""
        for tensor, other in zip(self.tensors, self.other, strict=True):
            kept = tensor.clone()
            tensor.copy_(other)
            other.copy_(kept)
