"""Process groups and device meshes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from verl_fl import _verl
from verl_fl._errors import explain
from verl_fl.patches.ledger import patch


@patch(
    target="verl.utils.distributed:initialize_global_process_group_ray",
    why="verl asks torch for 'cpu:gloo,cpu:gloo' on a CPU, and torch refuses a device that is named twice",
    reference="case cpu-backend-string; verl/utils/distributed.py",
    remove_when="verl builds the string from the platform and names each device once",
)
def process_group_backend_in_ray(original: Callable) -> Callable:
    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: float | None = None, backend: str | None = None) -> None:
        return original(timeout_second, backend or _backend())

    return initialize_global_process_group_ray


@patch(
    target="verl.utils.distributed:initialize_global_process_group",
    why="the torchrun twin of process-group-backend-in-ray has the same fault and no argument for the string",
    reference="case cpu-backend-string; verl/utils/distributed.py",
    remove_when="verl builds the string from the platform and names each device once",
)
def process_group_backend(original: Callable) -> Callable:
    @functools.wraps(original)
    def initialize_global_process_group(timeout_second: float = 36000) -> tuple[int, int, int]:
        if not _verl.on_our_platform():
            return original(timeout_second)
        import os
        from datetime import timedelta

        import torch.distributed as dist

        init_method = os.environ.get("DIST_INIT_METHOD")
        dist.init_process_group(_backend(), timeout=timedelta(seconds=timeout_second), init_method=init_method)
        local_rank = int(os.environ["LOCAL_RANK"])
        platform = _verl.current_platform()
        if platform.device_count() > 1:
            platform.set_device(local_rank)
        return local_rank, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    return initialize_global_process_group


def _backend() -> str | None:
    return _verl.current_platform().process_group_backend() if _verl.on_our_platform() else None


@patch(
    target="verl.checkpoint_engine.base:CheckpointEngineRegistry.new",
    why="verl's Mooncake engine keeps its buffer on 'cuda' unless engine_kwargs says otherwise, on every platform",
    reference="verl/checkpoint_engine/mooncake_checkpoint_engine.py",
    remove_when="the engines' default device is the platform's",
)
def transfer_device(original: Any) -> Any:
    make = original.__func__

    @functools.wraps(make)
    def new(cls: type, backend: str, *args: Any, **kwargs: Any) -> Any:
        accepted = inspect.signature(cls.get(backend)).parameters  # type: ignore[attr-defined]
        takes_device = "device" in accepted and accepted["device"].default == "cuda"
        if takes_device and "device" not in kwargs and len(args) <= list(accepted).index("device"):
            kwargs["device"] = _verl.current_platform().device_name
        return make(cls, backend, *args, **kwargs)

    return classmethod(new)


@patch(
    target="verl.workers.engine.fsdp.utils:create_device_mesh",
    why="with fsdp_size=1 on several ranks the gradients are never averaged: each rank trains a model of its own",
    reference="case shard-size-one",
    remove_when="verl or torch averages gradients over the replicate axis when the shard axis has size one",
)
def shard_size_one(original: Callable) -> Callable:
    @functools.wraps(original)
    def create_device_mesh(world_size: int, fsdp_size: int) -> Any:
        if fsdp_size == 1 and world_size > 1:
            raise ValueError(
                explain(
                    "a shard size of one does not average gradients between the ranks",
                    asked=f"fsdp_config.fsdp_size=1 with {world_size} ranks",
                    legal=f"-1 (all ranks) or a divisor of {world_size} above 1",
                    fix="set actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 (and ref's and critic's)",
                )
            )
        return original(world_size, fsdp_size)

    return create_device_mesh


@patch(
    target="verl.workers.engine.fsdp.transformer_impl:CPUOffloadPolicy",
    why="verl offloads the reference model to pinned host memory, which needs an accelerator; where host memory is the "
    "device memory there is nothing to offload to",
    reference="verl/workers/engine/fsdp/transformer_impl.py _build_fsdp_module",
    remove_when="verl asks the platform before it pins memory",
)
def pinned_offload(original: type) -> Callable:
    @functools.wraps(original, updated=())
    def offload_policy(pin_memory: bool = True) -> Any:
        return original(pin_memory=pin_memory) if _verl.supports("pinned_memory")[0] else None

    return offload_policy


@patch(
    target="verl.utils.fsdp_utils:fsdp2_sharded_save_to_cpu",
    why="verl snapshots the policy with .cpu(), which on a CPU returns the live parameters, and it takes parameters "
    "that are gathered at that moment for plain tensors: decoupled PPO (parameter_sync_step > 1) then computes old "
    "log-probabilities with the wrong weights, silently",
    reference="verl/utils/fsdp_utils.py fsdp2_sharded_save_to_cpu",
    remove_when="verl shards the model first and copies with .to('cpu', copy=True), as it does for FSDP1",
)
def snapshot_is_a_copy(original: Callable) -> Callable:
    @functools.wraps(original)
    def fsdp2_sharded_save_to_cpu(model: Any) -> tuple[dict, Any]:
        _reshard(model)
        state, spec = original(model)
        live = {getattr(param, "_local_tensor", param).data_ptr() for param in model.parameters()}
        copied = {
            name: (tensor.clone() if tensor.data_ptr() in live else tensor, own)
            for name, (tensor, own) in state.items()
        }
        return copied, spec

    return fsdp2_sharded_save_to_cpu


@patch(
    target="verl.utils.fsdp_utils:fsdp2_sharded_load_from_cpu",
    why="the counterpart restores into gathered parameters, which are thrown away at the next reshard, or finds no "
    "sharded ones at all (reshard_after_forward=False) and raises",
    reference="verl/utils/fsdp_utils.py fsdp2_sharded_load_from_cpu",
    remove_when="verl shards the model before it restores it",
)
def restore_into_shards(original: Callable) -> Callable:
    @functools.wraps(original)
    def fsdp2_sharded_load_from_cpu(model: Any, *args: Any, **kwargs: Any) -> None:
        _reshard(model)
        original(model, *args, **kwargs)

    return fsdp2_sharded_load_from_cpu


def _reshard(model: Any) -> None:
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
