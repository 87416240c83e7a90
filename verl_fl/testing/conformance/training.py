"""Collectives, a training step, a rollout: the same numbers as on the host."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch

from verl_fl.platform.base import Platform
from verl_fl.testing.conformance import _pair
from verl_fl.testing.conformance._check import Skip, check, expect


@check("torch and FSDP look a backend up for each device type in it", group="collectives")
def backend_string(platform: Platform) -> None:
    own, device = platform.communication_backend_name(), platform.device_name
    expected = f"cpu:{own}" if device == "cpu" else f"cpu:gloo,{device}:{own}"
    found = platform.process_group_backend()
    expect(found == expected, "process_group_backend() is not one entry for each device", found=found, legal=expected)


@check("gradients of two workers would be averaged wrongly, or never", group="collectives", processes=2)
def collectives(platform: Platform) -> None:
    if _pair.world_size(platform) < 2:
        raise Skip("this machine shows one device, and two processes need one each")
    _pair.run(platform, "collectives")


def rank_collectives(platform: Platform, rank: int, _: str) -> None:
    """The body of :func:`collectives`, on one of two ranks."""
    import torch.distributed as dist

    device = platform.device_name
    ours = torch.arange(4.0).to(platform.current_device()) + 10 * rank
    plain = [torch.arange(4.0), torch.arange(4.0) + 10]

    def same(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        expect(torch.equal(found.cpu(), wanted), f"{what} is wrong", found=found.tolist(), legal=wanted.tolist())

    for what, operation, wanted in (
        ("all_reduce(SUM)", dist.ReduceOp.SUM, plain[0] + plain[1]),
        ("all_reduce(MAX)", dist.ReduceOp.MAX, plain[1]),
    ):
        tensor = ours.clone()
        dist.all_reduce(tensor, op=operation)
        same(what, tensor, wanted)
    tensor = ours.clone()
    dist.broadcast(tensor, 1)
    same("broadcast", tensor, plain[1])
    gathered = [torch.zeros(4, device=ours.device) for _ in range(2)]
    dist.all_gather(gathered, ours)
    same("all_gather", torch.stack(gathered), torch.stack(plain))
    whole, part = torch.zeros(8, device=ours.device), torch.zeros(2, device=ours.device)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, ours)  # torch renamed them in 2.13
    same("all_gather_into_tensor", whole, torch.cat(plain))
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(part, ours, op=dist.ReduceOp.AVG)
    same("reduce_scatter_tensor(AVG)", part, ((plain[0] + plain[1]) / 2)[2 * rank : 2 * rank + 2])
    if rank == 0:
        dist.send(ours, 1)
    else:
        received = torch.zeros(4, device=ours.device)
        dist.recv(received, 0)
        same("recv", received, plain[0])
    host = torch.ones(2) * (rank + 1)
    dist.all_reduce(host)
    same(f"all_reduce of a host tensor in a group for {device}", host, torch.full((2,), 3.0))
    dist.barrier()


@check("training would go on with other numbers than on every other chip", group="training", processes=2)
def fsdp2_step(platform: Platform) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _pair.run(platform, "fsdp2", folder)
        losses, weights = torch.load(os.path.join(folder, "result.pt"), weights_only=True)
    expected_losses, expected_weights = _train("cpu", rank=None)
    worst = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
    expect(worst < 2e-4, "the loss differs from the host's", found=losses, legal=expected_losses)
    for name, expected in expected_weights.items():
        off = (weights[name] - expected).abs().max().item()
        expect(off < 2e-4, f"after three steps {name} differs from the host's", found=f"by up to {off:.2g}")


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
    expect(on_device == on_host, "greedy tokens differ from the host's", found=on_device, legal=on_host)
