"""The built-in rollout as a verl replica: which actor it starts, where, and with how many cores."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.net_utils import is_valid_ipv6_address
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from verl_fl import _env, _verl
from verl_fl._errors import explain
from verl_fl.platform.base import Platform
from verl_fl.platform.cpu import usable_cores
from verl_fl.rollout.native.server import NativeServer


class NativeReplica(RolloutReplica):
    """One :class:`NativeServer` beside the worker that feeds it weights.

    Raises:
        ValueError: a parallel size above one, which the built-in rollout does not have.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.world_size != 1:
            sizes = {
                name: getattr(self.config, name)
                for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
            }
            raise ValueError(
                explain(
                    "a replica of rollout 'native' is one process",
                    asked=", ".join(f"rollout.{name}={size}" for name, size in sizes.items()),
                    legal="1 for each",
                    fix="set them to 1; more workers (n_gpus_per_node) give more replicas",
                )
            )

    async def launch_servers(self) -> None:
        """Start the server on the worker's node and wait until it answers."""
        node_id, cores, local_world_size, device = await self.workers[0].__ray_call__.remote(_where)
        neighbours = self.config.n_gpus_per_node if self.rollout_mode is RolloutMode.STANDALONE else local_world_size
        threads = int(_env.read(_env.NUM_THREADS) or max(1, cores // neighbours))
        server = (
            ray.remote(NativeServer)
            .options(
                name=self._server_name(),
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
                # Weights and keys are streamed from memory at every token: large pages spare most of the look-ups.
                runtime_env={
                    "env_vars": {"OMP_NUM_THREADS": str(threads), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **device}
                },
            )
            .remote(
                config=self.config,
                model_config=_hf_model_config(self.model_config),
                replica_rank=self.replica_rank,
                num_threads=threads,
            )
        )
        self.servers = [server]
        self._server_handle = server
        host, port = await server.launch_server.remote()
        self._server_address = f"[{host}]:{port}" if is_valid_ipv6_address(host) else f"{host}:{port}"

    def _server_name(self) -> str:
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        return f"native_server_{kind}{self.replica_rank}_0{self.name_suffix}"

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """End one request with what it has so far."""
        return await self.servers[0].abort_request.remote(request_id)

    async def sleep(self) -> None:
        """Sleep once nothing is running any more."""
        await asyncio.gather(*[server.wait_for_requests_to_drain.remote() for server in self.servers])
        await super().sleep()


def _where(worker: Any) -> tuple[str, int, int, dict[str, str]]:
    """Run on the worker: ``(node id, usable cores, worker processes of its group on this node, its device)``.

    The device is the environment in which a process sees that one and no other.
    """
    platform = _verl.current_platform()
    device = {}
    if isinstance(platform, Platform) and platform.device_name != "cpu":
        device = {_env.PLATFORM: platform.name, platform.visible_devices: platform.device_id(platform.current_device())}
        device |= dict.fromkeys(platform.ray_noset_envvars(), "1")  # or Ray masks an actor that asks for no device
    local_world_size = int(os.environ.get("RAY_LOCAL_WORLD_SIZE", "1"))
    return ray.get_runtime_context().get_node_id(), usable_cores(), local_world_size, device


def _hf_model_config(model_config: Any) -> HFModelConfig:
    return omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
