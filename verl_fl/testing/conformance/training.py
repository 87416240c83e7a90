"""A training step and a rollout: the same numbers as on the host."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch

from verl_fl.platform.base import Platform
from verl_fl.testing.conformance import _pair
from verl_fl.testing.conformance._check import Skip, check, expect


@check("training would go on with other numbers than on every other chip", group="training", processes=2)
def fsdp2_step(platform: Platform) -> str:
    with tempfile.TemporaryDirectory() as folder:
        _pair.run(platform, "fsdp2", folder)
        losses, weights = torch.load(os.path.join(folder, "result.pt"), weights_only=True)
    expected_losses, expected_weights = _train("cpu", rank=None)
    close = all(abs(a - b) < 2e-4 for a, b in zip(losses, expected_losses, strict=True))
    fix = "find the operator: run the layers one by one on device and host; turn reduced-precision matmul of fp32 off"
    expect(close, "the loss differs from the host's", found=losses, legal=expected_losses, fix=fix)
    off = {name: (weights[name] - expected).abs().max().item() for name, expected in expected_weights.items()}
    wrong = ", ".join(f"{name} by {value:.2g}" for name, value in off.items() if not value < 2e-4)
    expect(not wrong, "after three steps weights differ from the host's", found=wrong, legal="less than 2e-4", fix=fix)
    return f"in {_pair.world_size(platform)} processes"


def rank_fsdp2(platform: Platform, rank: int, folder: str) -> None:
    """The body of :func:`fsdp2_step`, on each rank."""
    losses, weights = _train(platform.device_name, rank=rank)
    if rank == 0:
        torch.save((losses, weights), os.path.join(folder, "result.pt"))


def _train(device: str, *, rank: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three steps of a small transformer; sharded over the group, each rank with a share of the batch, unless None."""
    torch.manual_seed(11)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Embedding(50, 16),
        *[torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)],
        torch.nn.Linear(16, 50),
    )
    tokens = torch.randint(0, 50, (3, 4, 7))
    if rank is not None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model.to(device)
        size = torch.distributed.get_world_size()
        mesh = init_device_mesh(device, (size,))
        for layer in model:  # type: ignore[attr-defined]  # a Sequential
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)  # eps: noise is no direction
    losses = []
    for batch in tokens:
        own = batch if rank is None else batch.chunk(size)[rank]
        inputs = own.to(device)
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(loss.detach(), rank))
    weights = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.state_dict().items()}
    return losses, {name: value.cpu() for name, value in weights.items()}


def _mean(loss: torch.Tensor, rank: int | None) -> float:
    if rank is None:
        return loss.item()
    import torch.distributed as dist

    host = loss.cpu()
    dist.all_reduce(host)
    return host.item() / dist.get_world_size()


@check(
    "the built-in rollout would answer other tokens than the trained model", group="rollout", needs=("transformers",)
)
def native_rollout(platform: Platform) -> None:
    try:
        from verl_fl.rollout.native.engine import NativeEngine
    except ImportError as error:
        raise Skip(f"the rollout's own needs are not installed: {error}") from error
    from transformers import AutoModelForCausalLM, Qwen2Config

    from verl_fl.rollout.native.sampling import SamplingParams

    sizes: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config = Qwen2Config(vocab_size=120, num_key_value_heads=2, max_position_embeddings=64, eos_token_id=1, **sizes)

    def answers(device: Any) -> list[list[int]]:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        engine = NativeEngine(model, eos_token_ids=[1], max_model_len=64, kv_cache_bytes=1 << 22, device=device)
        for index, prompt in enumerate(([3, 5, 8], [13, 21, 34, 55, 89])):
            engine.add_request(str(index), prompt, SamplingParams(max_tokens=10, temperature=0, ignore_eos=True))
        outputs = {}
        while engine.has_work():
            outputs.update({output.request_id: output.token_ids for output in engine.step()})
        return [list(outputs[str(index)]) for index in range(2)]

    on_device, on_host = answers(platform.current_device()), answers("cpu")
    fix = "find the operator: compare one forward pass of the model on device and host, layer by layer"
    expect(on_device == on_host, "greedy tokens differ from the host's", found=on_device, legal=on_host, fix=fix)
