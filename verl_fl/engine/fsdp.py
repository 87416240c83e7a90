"""Stock FSDP engines, registered for the platforms that verl-fl brings.

Imported only from the post-import hook on verl's own FSDP engine: importing that module fixes the platform.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from verl.plugin.platform import PlatformRegistry
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_fl import _env, _verl
from verl_fl.platform.base import Platform
from verl_fl.platform.cpu import keep_freed_memory, usable_cores

logger = logging.getLogger("verl_fl.engine")


class _OnAnyPlatform:
    """Sets up the process for its platform, then is the stock engine."""

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        if engine_config.strategy == "fsdp" and not (supported := _verl.supports("fsdp1"))[0]:
            logger.warning("engine: strategy=fsdp runs as fsdp2 here: %s", supported[1])
            object.__setattr__(engine_config, "strategy", "fsdp2")
        use_cores(local_world_size=int(os.environ.get("RAY_LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        # A mixin: the stock engine is next in line.
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)  # type: ignore[call-arg]

    def _build_module(self) -> Any:
        module = super()._build_module()  # type: ignore[misc]
        if _verl.current_platform().device_name == "cpu" and module.config._attn_implementation == "sdpa":
            from verl_fl.engine import attention

            module.set_attn_implementation(attention.NAME)
        return module


class LMHeadEngine(_OnAnyPlatform, FSDPEngineWithLMHead):
    """Actor and reference model."""


class ValueHeadEngine(_OnAnyPlatform, FSDPEngineWithValueHead):
    """Critic."""


def use_cores(local_world_size: int) -> int:
    """Give torch this process's share of the node's cores (and of its memory), and return the number of threads.

    Ray starts every worker with ``OMP_NUM_THREADS=1``; on a CPU platform that leaves all other cores idle.
    """
    threads = int(_env.read(_env.NUM_THREADS) or max(1, usable_cores() // local_world_size))
    if _verl.current_platform().device_name == "cpu":
        keep_freed_memory()
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def register() -> None:
    """Register both engines for every platform of our contract in verl's registry. Idempotent.

    For its (device, vendor), unless verl has an engine for that chip itself, and for its device alone where verl has
    none, so that ``VERL_ENGINE_DEVICE`` finds it whatever the vendor is.
    """
    for name in PlatformRegistry.registered_names():
        platform_cls = PlatformRegistry.get(name)
        if platform_cls is None or not issubclass(platform_cls, Platform) or platform_cls.verl_name:
            continue
        platform = platform_cls()
        device, vendor = platform.device_name, platform.vendor_name
        for model_type, engine_cls in (("language_model", LMHeadEngine), ("value_model", ValueHeadEngine)):
            _register(model_type, engine_cls, device, None)
            _register(model_type, engine_cls, device, vendor)


def _register(model_type: str, engine_cls: type, device: str, vendor: str | None) -> None:
    table = EngineRegistry._engines.get(model_type, {})
    for backend in ("fsdp", "fsdp2"):
        if ((device, vendor) if vendor else device) not in table.get(backend, {}):
            EngineRegistry.register(model_type=model_type, backend=backend, device=device, vendor=vendor)(engine_cls)
