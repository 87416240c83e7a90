"""The preflight: what is wrong with a run is said on the driver, before Ray starts and a model is loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl_fl.patches.ledger import patch


@patch(
    target="verl.utils.config:validate_config",
    why="verl checks batch arithmetic only: a missing column, file, function or CPU is met minutes later in a worker, "
    "under another name, or never",
    reference="cases missing-column, cpu-shortage and async-save-no-tracker; verl/trainer/main_ppo.py main",
    remove_when="verl checks model, data, reward, resources and disk before it starts Ray",
)
def preflight(original: Callable) -> Callable:
    @functools.wraps(original)
    def validate_config(config: Any, use_reference_policy: bool, use_critic: bool) -> None:
        from verl_fl.preflight import check

        check(config, use_reference=use_reference_policy, use_critic=use_critic)
        return original(config, use_reference_policy, use_critic)

    return validate_config


@patch(
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._init_resource_pool_mgr",
    why="on a cluster that runs already, verl asks for worker bundles that the CPUs left over by the TransferQueue "
    "can't hold, and waits",
    reference="case cpu-shortage",
    remove_when="verl checks the cluster's CPUs against all that it will ask for",
)
def cluster_check(original: Callable) -> Callable:
    @functools.wraps(original)
    def _init_resource_pool_mgr(self: Any) -> None:
        from verl_fl.preflight.cluster import on_cluster

        on_cluster(self.config)
        return original(self)

    return _init_resource_pool_mgr


@patch(
    target="transfer_queue:init",
    why="the TransferQueue's controller and storage units take a CPU each, and wait for ever where there is none",
    reference="case cpu-shortage; notes/verl-0.9.1.md section 0",
    remove_when="TransferQueue's actors ask for no CPU, or their placement has a limit",
)
def queue_check(original: Callable) -> Callable:
    @functools.wraps(original)
    def init(conf: Any = None) -> Any:
        if conf is not None:
            from verl_fl.patches.resources import check_demand
            from verl_fl.preflight.cluster import queue_cpus

            what = "the TransferQueue (its controller and storage units)"
            check_demand([{"CPU": 1.0}] * queue_cpus({"transfer_queue": conf}), what=what)
        return original(conf)

    return init
