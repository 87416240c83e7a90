"""Which device a worker takes, and what verl and Ray say of it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from verl_fl import _env, _verl
from verl_fl._errors import explain
from verl_fl.patches.ledger import patch
from verl_fl.platform.base import Platform
from verl_fl.preflight.cluster import ray_knows, unit_resources

logger = logging.getLogger("verl_fl.platform")


@patch(
    target="verl.single_controller.base.worker:Worker._setup_env_cuda_visible_devices",
    why="verl gives a worker its device only where Ray masks devices by itself; for another vendor's resource every "
    "worker of a node takes device 0, and where Ray was told not to mask, an id is taken for an index",
    reference="cases leaked-mask and musa-mask; verl/single_controller/base/worker.py",
    remove_when="verl asks the platform for the index of the device that Ray assigned",
)
def worker_device(original: Callable) -> Callable:
    @functools.wraps(original)
    def _setup_env_cuda_visible_devices(self: Any) -> None:
        platform = _verl.current_platform()
        if not isinstance(platform, Platform) or platform.device_name == "cpu":
            return original(self)
        known = platform.ray_resource_name() in ray_knows()
        if known:
            with _unset(platform.ray_noset_envvars()) as told_not_to_mask:
                original(self)
            if not told_not_to_mask:
                return None
        platform.adopt_mask()
        index = _assigned(platform, known)
        os.environ["LOCAL_RANK"] = str(index)
        platform.set_device(index)

    return _setup_env_cuda_visible_devices


@contextlib.contextmanager
def _unset(names: list[str]) -> Iterator[bool]:
    """Take variables out of the environment for a while; yields whether any was set to something true."""
    held = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield any(held.values())
    finally:
        os.environ.update(held)


def _assigned(platform: Platform, known: bool) -> int:
    """The index, among the devices this process sees, of the one that Ray assigned to this actor."""
    import ray

    resource = platform.ray_resource_name()
    if known:
        ids = ray.get_runtime_context().get_accelerator_ids().get(resource) or []
        if ids:
            return _existing(platform, platform.device_index(ids[0]), "the device that Ray assigned")
    elif resource in os.environ.get(_env.RAY_UNIT_RESOURCES, "").split(","):
        from ray._private import worker

        held: dict[str, Any] = worker.global_worker.core_worker.resource_ids()  # type: ignore[attr-defined]  # set late
        # A placement group's resource exists with its bundle's index too; Ray itself reads the one without.
        own = re.compile(rf"{re.escape(resource)}(_group_[0-9A-Za-z]+)?")
        slots = [ids[0][0] for name, ids in held.items() if own.fullmatch(name) and ids]
        if slots:
            return _existing(platform, int(slots[0]), "the slot that Ray assigned")
    rank, local_size = int(os.environ.get("RANK", "0")), int(os.environ.get("RAY_LOCAL_WORLD_SIZE", "1"))
    logger.warning(
        "platform: Ray does not say which %s this worker has, so it takes its rank on the node, %d; two pools on one "
        "node would share devices. Start Ray with %s=%s",
        *(resource, rank % local_size, _env.RAY_UNIT_RESOURCES, unit_resources(resource)),
    )
    return _existing(platform, rank % local_size, "this worker's rank on the node")


def _existing(platform: Platform, index: int, what: str) -> int:
    count, mask = platform.device_count(), platform.visible_devices
    if index < count:
        return index
    raise ValueError(
        explain(
            f"{what}, {index}, is no device of this process",
            asked=f"one {platform.ray_resource_name()} for each worker",
            found=f"{count} devices; {mask}={os.environ.get(mask, '(not set)')}",
            fix=f"start Ray on this node with --resources='{{\"{platform.ray_resource_name()}\": {count}}}'",
        )
    )


class _WithOwn(dict):
    """What Ray reports, and under the platform's resource, which Ray has no name for, this process's device.

    Only a look-up finds it: Ray itself goes through the items, and has a manager for each.
    """

    def __missing__(self, resource: str) -> list[str]:
        platform = _verl.current_platform()
        if not isinstance(platform, Platform) or platform.device_name == "cpu":
            raise KeyError(resource)
        if resource != platform.ray_resource_name():
            raise KeyError(resource)
        return [platform.device_id(platform.current_device())]


@patch(
    target="ray.runtime_context:RuntimeContext.get_accelerator_ids",
    why="verl's vLLM replica asks Ray for the ids of the platform's resource and gets a KeyError for every resource "
    "that Ray does not know, such as MUSA",
    reference="verl/workers/rollout/vllm_rollout/vllm_async_server.py launch_servers",
    remove_when="verl asks the worker which device it took",
)
def custom_device_ids(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_accelerator_ids(self: Any) -> dict[str, list[str]]:
        return _WithOwn(original(self))

    return get_accelerator_ids


@patch(
    target="verl.utils.ray_utils:ray_noset_visible_devices",
    why="verl's list of the variables that keep Ray from masking holds the vendors that Ray knows, not the platform's",
    reference="case leaked-mask; verl/utils/ray_utils.py",
    remove_when="verl asks platform.ray_noset_envvars()",
)
def noset_variables(original: Callable) -> Callable:
    @functools.wraps(original)
    def ray_noset_visible_devices(env_vars: Any = os.environ) -> bool:
        own = any(env_vars.get(name) for name in _verl.current_platform().ray_noset_envvars())
        return bool(own or original(env_vars))

    return ray_noset_visible_devices


@patch(
    target="verl.utils.distributed:set_numa_affinity",
    why="verl pins a worker by asking NVML about a device with the same index, on any vendor's machine where NVML's "
    "Python package is installed, and prints a warning where it is not",
    reference="verl/utils/distributed.py",
    remove_when="verl asks the platform for a device's NUMA node",
)
def numa_affinity(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_numa_affinity() -> None:
        platform = _verl.current_platform()
        if not isinstance(platform, Platform) or platform.smi_tool == "nvidia-smi":  # that tool is NVML's front end
            original()

    return set_numa_affinity


@patch(
    target="tensordict.base:TensorDictBase._sync_all",
    why="tensordict copies to the host without waiting, then waits for the device that torch names first: none before "
    "tensordict 0.10 but CUDA and MPS, and CUDA, which never started, where a shim answers for it; so the "
    "batch that a worker returns may be read before it has arrived",
    reference="case shim-makes-cuda; verl/__init__.py, https://github.com/pytorch/tensordict/issues/725",
    remove_when="verl requires tensordict 0.10 and torch's lookup of the device can't be misled by a shim",
)
def copies_arrive(original: Callable) -> Callable:
    @functools.wraps(original)
    def _sync_all(self: Any) -> None:
        platform = _verl.decided_platform()
        if not isinstance(platform, Platform) or platform.device_name in ("cuda", "cpu"):
            return original(self)
        started = getattr(platform.device_module, "is_initialized", platform.is_available)
        if started():  # else this process has no work on the device to wait for
            platform.synchronize()
        return None

    return _sync_all
