"""Process groups: their backend, and every collective that verl and FSDP call, at world size two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from verl_fl._errors import explain
from verl_fl.platform.base import Platform
from verl_fl.testing.conformance import _pair
from verl_fl.testing.conformance._check import Failed, Skip, check, expect


@check("torch and FSDP look a backend up for each device type in it", group="collectives")
def backend_string(platform: Platform) -> None:
    own, device = platform.communication_backend_name(), platform.device_name
    expected = f"cpu:{own}" if device == "cpu" else f"cpu:gloo,{device}:{own}"
    found, fix = platform.process_group_backend(), "state the library's name in `collective`, and drop the override"
    expect(found == expected, "process_group_backend() has not an entry a device", found=found, legal=expected, fix=fix)


@check("gradients of two workers would be averaged wrongly, or never", group="collectives", processes=2)
def collectives(platform: Platform) -> None:
    if _pair.world_size(platform) < 2:
        raise Skip("this machine shows one device, and two processes need one each")
    _pair.run(platform, "collectives")


def rank_collectives(platform: Platform, rank: int, _: str) -> None:
    """The body of :func:`collectives`, on one of two ranks: all operations are tried, the wrong ones told."""
    wrong = []
    for name, call, wanted in _operations(platform, rank):
        try:
            found = call()
        except Exception as error:
            wrong.append(explain(f"{name} raises {type(error).__name__}: {error}", legal=wanted))
            break  # the other rank may be anywhere now
        if found != wanted:
            wrong.append(explain(f"{name} is wrong", found=found, legal=wanted))
    if wrong:
        own = platform.communication_backend_name()
        raise Failed("\n".join([*wrong, f"  do: look at this call in torch.distributed's backend {own!r}"]))


Operation = tuple[str, Callable[[], Any], Any]
"""Its name, a call that gives plain values, and the values that are right."""

_ZERO, _ONE = [0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]
"""What rank 0 has, and rank 1."""

_SUM = [10.0, 12.0, 14.0, 16.0]


def _operations(platform: Platform, rank: int) -> Iterator[Operation]:
    """Both ranks make the same calls, in this order."""
    device = torch.ones(1).to(platform.current_device()).device

    def ours(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor((_ZERO, _ONE)[rank], dtype=dtype).to(device)

    yield from _reductions(platform, ours)
    yield from _moves(ours, rank)
    yield from _mixed(platform, rank)


def _reductions(platform: Platform, ours: Callable[..., torch.Tensor]) -> Iterator[Operation]:
    import torch.distributed as dist

    def reduced(operation: Any, dtype: torch.dtype = torch.float32, later: bool = False) -> list[float]:
        tensor = ours(dtype)
        work = dist.all_reduce(tensor, op=operation, async_op=later)
        if later:
            work.wait()
        return (tensor * 1).float().tolist()  # work of the device that has to come after

    yield "all_reduce(SUM)", lambda: reduced(dist.ReduceOp.SUM), _SUM
    yield "all_reduce(MAX)", lambda: reduced(dist.ReduceOp.MAX), _ONE
    yield "all_reduce(MIN)", lambda: reduced(dist.ReduceOp.MIN), _ZERO
    yield "all_reduce(AVG)", lambda: reduced(dist.ReduceOp.AVG), [value / 2 for value in _SUM]
    yield "all_reduce(SUM, async_op=True), wait()", lambda: reduced(dist.ReduceOp.SUM, later=True), _SUM
    yield "all_reduce(SUM) of int64", lambda: reduced(dist.ReduceOp.SUM, torch.int64), _SUM
    if platform.supports("bf16")[0]:
        yield "all_reduce(SUM) of bfloat16", lambda: reduced(dist.ReduceOp.SUM, torch.bfloat16), _SUM


def _moves(ours: Callable[..., torch.Tensor], rank: int) -> Iterator[Operation]:
    import torch.distributed as dist

    def into(size: int, collective: Callable[[torch.Tensor, torch.Tensor], Any]) -> list[float]:
        tensor = torch.zeros(size, device=ours().device)
        collective(tensor, ours())
        return tensor.tolist()

    def broadcast() -> list[float]:
        tensor = ours()
        dist.broadcast(tensor, 1)
        return tensor.tolist()

    def all_gather() -> list[list[float]]:
        gathered = [torch.zeros_like(ours()) for _ in range(2)]
        dist.all_gather(gathered, ours())
        return [tensor.tolist() for tensor in gathered]

    def send_and_receive() -> list[float]:
        tensor = ours()
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        return tensor.tolist()

    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch renamed them in 2.13
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    half = slice(2 * rank, 2 * rank + 2)
    average = [value / 2 for value in _SUM]
    yield "broadcast", broadcast, _ONE
    yield "all_gather", all_gather, [_ZERO, _ONE]
    yield "all_gather_into_tensor", lambda: into(8, gather), _ZERO + _ONE
    yield "reduce_scatter_tensor(SUM)", lambda: into(2, scatter), _SUM[half]
    yield "reduce_scatter_tensor(AVG)", lambda: into(2, lambda o, i: scatter(o, i, op=dist.ReduceOp.AVG)), average[half]
    yield "all_to_all_single", lambda: into(4, dist.all_to_all_single), _ZERO[half] + _ONE[half]
    yield "send, recv", send_and_receive, _ZERO


def _mixed(platform: Platform, rank: int) -> Iterator[Operation]:
    """What verl does with a group for the device beyond tensors on the device."""
    import torch.distributed as dist

    def host() -> list[float]:
        tensor = torch.ones(2) * (rank + 1)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def gathered() -> list[Any]:
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        return objects

    def told() -> list[Any]:
        objects = [f"from {rank}", rank]
        dist.broadcast_object_list(objects, src=0)
        return objects

    def subgroups() -> float:
        groups = [dist.new_group([0]), dist.new_group([1])]
        tensor = torch.ones(1).to(platform.current_device())
        dist.all_reduce(tensor, group=groups[rank])
        return tensor.item()

    yield f"all_reduce of a host tensor in a group for {platform.device_name}", host, [3.0, 3.0]
    yield "all_gather_object", gathered, [{"rank": 0}, {"rank": 1}]
    yield "broadcast_object_list", told, ["from 0", 0]
    yield "all_reduce in a group of one", subgroups, 1.0
    yield "barrier", dist.barrier, None
