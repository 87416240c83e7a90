"""Engine settings that this platform can't run as they stand: mapped with one warning, or refused."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

from verl_fl import _verl
from verl_fl._errors import explain
from verl_fl._settings import select

logger = logging.getLogger("verl_fl.preflight")

_FSDP = ("fsdp", "fsdp2")


def choose_engines(config: Any, *, use_reference: bool, use_critic: bool) -> None:
    """Map ``fsdp`` to ``fsdp2`` where FSDP1 can't run, and an asynchronous FSDP checkpoint to a synchronous one.

    Raises:
        ValueError: the rollout engine is not installed on a platform of ours.
    """
    roles = ["actor_rollout_ref.actor", "actor_rollout_ref.ref"] + ["critic"] * use_critic
    supported, reason = _verl.supports("fsdp1")
    if not supported:
        _fsdp2_for(config, roles, reason)
    _save_in_step(config, roles)
    _merge_lora_for_sync(config)
    _check_rollout(config)


def _fsdp2_for(config: Any, roles: list[str], reason: str) -> None:
    changed = [role for role in roles if select(config, f"{role}.strategy") == "fsdp"]
    for role in changed:
        _set(config, f"{role}.strategy", "fsdp2")
    if changed:
        logger.warning("preflight: %s.strategy=fsdp2 instead of fsdp (%s)", ", ".join(changed), reason)


def _save_in_step(config: Any, roles: list[str]) -> None:
    """Stock verl skips the tracker file when async_save is on, but only Megatron writes it later: case
    async-save-no-tracker, a resume that restarts from zero in silence."""
    for role in roles:
        key = f"{role}.checkpoint.async_save"
        if select(config, key) and select(config, f"{role}.strategy") in _FSDP:
            _set(config, key, False)
            logger.warning("preflight: %s=False, because FSDP saves synchronously and would leave no tracker", key)


def _merge_lora_for_sync(config: Any) -> None:
    """A checkpoint engine sends verl's base weights only, never the adapter: case lora-split, a rollout that is not
    trained at all. Merged weights carry it."""
    lora = max(int(select(config, f"actor_rollout_ref.model.{key}", 0)) for key in ("lora_rank", "lora.rank"))
    separate = select(config, "trainer.v1.trainer_mode") == "separate_async"
    if lora > 0 and separate and not select(config, "actor_rollout_ref.model.lora.merge", False):
        _set(config, "actor_rollout_ref.model.lora.merge", True)
        logger.warning("preflight: model.lora.merge=True, because separate_async syncs no adapter beside the weights")


def _check_rollout(config: Any) -> None:
    name = select(config, "actor_rollout_ref.rollout.name")
    if name in ("vllm", "sglang") and _verl.on_our_platform() and find_spec(name) is None:
        platform = _verl.current_platform()
        raise ValueError(
            explain(
                f"the rollout engine {name!r} is not installed",
                asked=f"actor_rollout_ref.rollout.name={name}",
                found=f"platform {platform.device_name}; no package {name}",
                legal="native (built in), or vllm or sglang once installed",
                fix="set actor_rollout_ref.rollout.name=native, or +fl=cpu, which does it",
            )
        )


def _set(config: Any, key: str, value: Any) -> None:
    from omegaconf import OmegaConf

    OmegaConf.update(config, key, value, force_add=True)
