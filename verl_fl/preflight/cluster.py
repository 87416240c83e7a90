"""Ray's resources: what this run's actors will ask for, checked or filled in before Ray starts."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from verl_fl import _env, _verl
from verl_fl._errors import explain
from verl_fl._settings import select

logger = logging.getLogger("verl_fl.placement")

_CPUS_PER_WORKER = 3  # verl's RayResourcePool.max_colocate_count
_CPUS_PER_STANDALONE = 2
_SPARE = 2  # actors that need one CPU to be placed, and hold none afterwards
# Meaningless to a running cluster; ray.init refuses some of them together with an address.
_ONLY_AT_START = ("num_cpus", "num_gpus", "resources", "include_dashboard")


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What the run's actors hold at the same time."""

    parts: dict[str, int]
    """CPUs by who asks for them."""

    devices: int
    """Slots of the platform's Ray resource."""

    @property
    def cpus(self) -> int:
        """All CPUs."""
        return sum(self.parts.values())

    def table(self) -> str:
        """The parts in one line."""
        return ", ".join(f"{count} {what}" for what, count in self.parts.items() if count)


def demand(config: Any) -> Demand:
    """Count what verl's v1 trainer will ask of Ray."""
    trainers = _pool(config, "trainer")
    separate = select(config, "trainer.v1.trainer_mode") == "separate_async"
    standalone = _pool(config, "actor_rollout_ref.rollout") if separate else 0
    rewards = _pool(config, "reward.reward_model") if select(config, "reward.reward_model.enable_resource_pool") else 0
    teachers = _pool(config, "distillation") if select(config, "distillation.enabled") else 0
    parts = {
        "for the TransferQueue": queue_cpus(config),
        "for trainer workers": _CPUS_PER_WORKER * trainers,
        "for standalone rollout workers": _CPUS_PER_STANDALONE * standalone,
        "for reward-model workers": _CPUS_PER_WORKER * rewards,
        "for teacher workers": _CPUS_PER_WORKER * teachers,
        "for remote reward processes": _remote_rewards(config),
        "spare": _SPARE,
    }
    return Demand(parts=parts, devices=trainers + standalone + rewards + teachers)


def queue_cpus(config: Any) -> int:
    """CPUs of the TransferQueue: its controller, and its storage units where those are its own actors."""
    simple = select(config, "transfer_queue.backend.storage_backend", "SimpleStorage") == "SimpleStorage"
    return 1 + (int(select(config, "transfer_queue.backend.SimpleStorage.num_data_storage_units", 8)) if simple else 0)


def _remote_rewards(config: Any) -> int:
    """The reward manager ``remote`` starts as many actors in each reward worker as there are workers."""
    remote = select(config, "reward.reward_manager.name") == "remote"
    return int(select(config, "reward.num_workers", 1)) ** 2 if remote else 0


def _pool(config: Any, node: str) -> int:
    return int(select(config, f"{node}.nnodes", 0)) * int(select(config, f"{node}.n_gpus_per_node", 0))


def plan_ray(config: Any) -> None:
    """Fill in or check ``ray_kwargs.ray_init`` for a cluster of our own; take our keys out for one that runs already.

    Raises:
        ValueError: fewer CPUs or slots were asked of Ray than the run needs, so that it would wait for ever.
    """
    import ray

    if not select(config, "trainer.use_v1", True):
        return
    if ray.is_initialized():
        return on_cluster(config)
    if is_remote(config):
        _remove(config, [key for key in _ONLY_AT_START if select(config, f"ray_kwargs.ray_init.{key}") is None])
        if _verl.on_our_platform():
            _remove(config, _ONLY_AT_START)
        return
    need = demand(config)
    _plan_cpus(config, need)
    platform = _verl.current_platform()
    if _verl.on_our_platform() and platform.ray_resource_name() not in ray_knows():
        _plan_slots(config, need, platform)
    resources = select(config, "ray_kwargs.ray_init.resources") or {}
    _remove(config, [f"resources.{name}" for name, amount in resources.items() if amount is None])


def is_remote(config: Any) -> bool:
    """Whether ``ray.init`` will connect to a cluster instead of starting one."""
    address = select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    return bool(address) and address != "local"


def _plan_cpus(config: Any, need: Demand) -> None:
    key = "ray_kwargs.ray_init.num_cpus"
    given = select(config, key)
    if given is None:
        _set(config, key, max(need.cpus, _cores()))
        return
    if int(given) < need.cpus:
        raise ValueError(
            explain(
                "Ray would have too few logical CPUs, and the run would wait for ever",
                asked=f"{key}={given}",
                found=f"the run needs {need.cpus}: {need.table()}",
                legal=f"{need.cpus} or more; they are slots, not cores",
                fix=f"set {key}={need.cpus}, or null to let verl-fl count",
            )
        )


def _cores() -> int:
    """The cores that Ray itself would count: those of the control group, where it has a limit."""
    from ray._private.utils import get_num_cpus

    return int(get_num_cpus())


def ray_knows() -> set[str]:
    """Resources that Ray counts and masks by itself."""
    from ray._private.accelerators import get_all_accelerator_resource_names

    return set(get_all_accelerator_resource_names())


def unit_resources(resource: str) -> str:
    """What Ray must be told to number the units of ``resource``, as it does for the accelerators that it knows."""
    return ",".join(sorted((ray_knows() - {"GPU"}) | {resource}))


def _plan_slots(config: Any, need: Demand, platform: Any) -> None:
    resource = platform.ray_resource_name()
    key = f"ray_kwargs.ray_init.resources.{resource}"
    given = select(config, key)
    if platform.device_name != "cpu":
        os.environ.setdefault(_env.RAY_UNIT_RESOURCES, unit_resources(resource))
        _check_devices(need, platform)
    if given is None:
        _set(config, key, need.devices if platform.device_name == "cpu" else platform.device_count())
    elif float(given) < need.devices:
        raise ValueError(
            explain(
                f"Ray would have too few slots of {resource!r}",
                asked=f"{key}={given}",
                found=f"the pools of this run hold {need.devices} workers",
                fix=f"set {key}={need.devices}, or null to let verl-fl count",
            )
        )


def _check_devices(need: Demand, platform: Any) -> None:
    count = platform.device_count()
    if count < need.devices:
        raise ValueError(
            explain(
                f"this machine has too few {platform.name} devices",
                asked=f"{need.devices} for the pools of this run",
                found=f"{count}; {platform.visible_devices}={os.environ.get(platform.visible_devices, '(not set)')}",
                fix="lower trainer.n_gpus_per_node, or connect to a cluster: ray_kwargs.ray_init.address=auto",
            )
        )


def on_cluster(config: Any) -> None:
    """Check the CPUs of the cluster that this process is connected to.

    Raises:
        ValueError: it has too few in all; with demand, supply, and the fix.
    """
    import ray

    need, supply = demand(config), ray.cluster_resources().get("CPU", 0)
    if supply < need.cpus:
        raise ValueError(
            explain(
                "the Ray cluster has too few logical CPUs, and the run would wait for ever",
                asked=f"{need.cpus} CPUs: {need.table()}",
                found=f"{supply:g} CPUs in {len([node for node in ray.nodes() if node['Alive']])} nodes",
                fix=f"start Ray with --num-cpus={need.cpus} (slots, not cores), or ask for fewer workers or "
                "transfer_queue.backend.SimpleStorage.num_data_storage_units",
            )
        )


def _set(config: Any, key: str, value: Any) -> None:
    from omegaconf import OmegaConf

    OmegaConf.update(config, key, value, force_add=True)


def _remove(config: Any, keys: Any) -> None:
    from omegaconf import open_dict

    node = select(config, "ray_kwargs.ray_init")
    if node is None:
        return
    with open_dict(node):
        for key in keys:
            *path, last = key.split(".")
            (select(node, path[0]) if path else node).pop(last, None)
