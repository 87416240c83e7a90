"""Ray resources: counted per platform and per node, and never waited for in silence."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from verl_fl import _env, _verl
from verl_fl._errors import explain
from verl_fl.patches.ledger import patch

logger = logging.getLogger("verl_fl.placement")

Bundle = dict[str, float]
_PROGRESS_S = 15.0


@patch(
    target="verl.single_controller.ray.base:ResourcePoolManager._check_resource_available",
    why="verl counts the Ray resources GPU and NPU by name, so that every other platform has zero devices",
    reference="case resource-name; verl/single_controller/ray/base.py",
    remove_when="verl counts platform.ray_resource_name()",
)
def resource_count(original: Callable) -> Callable:
    @functools.wraps(original)
    def _check_resource_available(self: Any) -> None:
        resource = _verl.current_platform().ray_resource_name()
        demand = [{resource: float(count)} for counts in self.resource_pool_spec.values() for count in counts]
        check_demand(demand, what=f"resource pools {', '.join(self.resource_pool_spec)}")

    return _check_resource_available


@patch(
    target="verl.single_controller.ray.base:RayResourcePool.get_placement_groups",
    why="verl waits for ever for a placement group that no node can hold, and says nothing while it waits",
    reference="case cpu-shortage; verl/single_controller/ray/base.py",
    remove_when="verl checks a bundle against single nodes and limits the wait",
)
def bounded_placement(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_placement_groups(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.pgs is not None:
            return self.pgs
        groups = pool_demand(self)
        check_demand(groups, what=f"pool {self.name_prefix!r}")
        return _wait(lambda: original(self, *args, **kwargs), groups, f"pool {self.name_prefix!r}")

    return get_placement_groups


def pool_demand(pool: Any) -> list[Bundle]:
    """What each placement group of ``pool`` asks of the one node that must hold it."""
    bundle: Bundle = {"CPU": float(pool.max_colocate_count)}
    if pool.use_gpu:
        bundle[_verl.current_platform().ray_resource_name()] = 1.0
    return [{name: amount * count for name, amount in bundle.items()} for count in pool.store]


def check_demand(groups: list[Bundle], *, what: str) -> None:
    """Check that the nodes' total resources can hold every group, each on a single node, largest first.

    Raises:
        ValueError: they can't, however long one waits; with demand, supply per node, and the fix.
    """
    import ray

    supply = {
        node["NodeManagerAddress"] + f" ({node['NodeID'][:6]})": dict(node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    }
    ordered = sorted(groups, key=lambda group: -sum(group.values()))
    if not _place(ordered, [dict(resources) for resources in supply.values()]):
        alone = [group for group in ordered if not _place([group], [dict(r) for r in supply.values()])]
        raise ValueError(_shortage(groups, (alone or ordered)[0], supply, what))


def _place(groups: list[Bundle], free: list[Bundle]) -> bool:
    """Whether each group finds a node of its own choice; tries every way, since the first fit is not always one."""
    if not groups:
        return True
    group, tried = groups[0], []
    for resources in free:
        if resources in tried or any(resources.get(name, 0.0) < amount for name, amount in group.items()):
            continue
        tried.append(dict(resources))
        for name, amount in group.items():
            resources[name] -= amount
        if _place(groups[1:], free):
            return True
        for name, amount in group.items():
            resources[name] += amount
    return False


def _wait(place: Callable[[], Any], groups: list[Bundle], what: str) -> Any:
    limit_s = float(_env.read(_env.PLACEMENT_TIMEOUT_S) or 300)
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((True, place()))
        except BaseException as error:  # handed to the caller's thread below
            result.append((False, error))

    thread = threading.Thread(target=run, name="verl_fl-placement", daemon=True)
    thread.start()
    start = time.monotonic()
    while not result:
        thread.join(min(_PROGRESS_S, limit_s))
        waited_s = time.monotonic() - start
        if not result and waited_s >= limit_s:
            raise TimeoutError(_stuck(groups, what, limit_s))
        if not result:
            logger.warning("placement: %s still waits after %.0f s for %s", what, waited_s, _show(groups))
    succeeded, value = result[0]
    if not succeeded:
        raise value
    return value


def _show(groups: list[Bundle]) -> str:
    return "; ".join(", ".join(f"{name} {amount:g}" for name, amount in group.items()) for group in groups)


def _nodes(supply: dict[str, Bundle], names: set[str]) -> str:
    rows = [
        f"{node}: " + ", ".join(f"{name} {res.get(name, 0):g}" for name in sorted(names))
        for node, res in supply.items()
    ]
    return "; ".join(rows) or "no node is alive"


def _shortage(groups: list[Bundle], worst: Bundle, supply: dict[str, Bundle], what: str) -> str:
    short = sorted(name for name in worst if all(res.get(name, 0) < worst[name] for res in supply.values()))
    return explain(
        f"the Ray cluster can never hold {what}: {', '.join(short) or 'the groups together'} is short",
        asked=f"one node for each of: {_show(groups)}",
        found=_nodes(supply, {name for group in groups for name in group}),
        fix=f"start Ray with more ({_ray_start_hint(groups)}), or ask for fewer workers "
        "(trainer.n_gpus_per_node, trainer.nnodes, actor_rollout_ref.rollout.n_gpus_per_node)",
    )


def _ray_start_hint(groups: list[Bundle]) -> str:
    total: Bundle = {}
    for group in groups:
        for name, amount in group.items():
            total[name] = total.get(name, 0.0) + amount
    custom = {name: int(amount) for name, amount in total.items() if name not in ("CPU", "GPU")}
    import json

    flags = [f"--num-cpus={int(total['CPU']) + 4}"] if "CPU" in total else []
    flags += [f"--num-gpus={int(total['GPU'])}"] if "GPU" in total else []
    flags += [f"--resources='{json.dumps(custom)}'"] if custom else []
    return "ray start " + " ".join(flags)


def _stuck(groups: list[Bundle], what: str, limit_s: float) -> str:
    import ray

    free = ray._private.state.available_resources_per_node()
    return explain(
        f"Ray did not place {what} within {limit_s:g} s",
        asked=_show(groups),
        found="free now: " + _nodes(free, {name for group in groups for name in group}),
        fix=f"end what holds the resources (`ray status`), or raise {_env.PLACEMENT_TIMEOUT_S}",
    )
