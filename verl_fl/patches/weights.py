"""What verl's checkpoint engines are given to send, and what their receivers are told of it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from verl_fl.patches.ledger import patch

logger = logging.getLogger("verl_fl.weight_sync")


@patch(
    target="verl.workers.engine_workers:ActorRolloutRefWorker.update_weights",
    why="with a checkpoint engine verl exports a LoRA model's base without its adapter, so the rollout never learns",
    reference="case lora-split; verl/workers/engine_workers.py",
    remove_when="update_weights sends the adapter, or merged weights, through checkpoint engines too",
)
def adapter_through_the_engine(original: Callable) -> Callable:
    @functools.wraps(original)
    async def update_weights(self: Any, global_steps: int | None = None, mode: str = "auto") -> Any:
        backend = self.config.rollout.checkpoint_engine.backend if mode == "auto" else mode
        if backend != "fl":
            return await original(self, global_steps, mode)
        actor, engine = self.actor.engine, self.checkpoint_engine
        summon = bool(self.config.rollout.get("layered_summon", False))
        weights, adapter = actor.get_per_tensor_param(layered_summon=summon, base_sync_done=True)
        if adapter is None:
            return await engine.send_weights(weights, global_steps=global_steps) or {}
        if engine.lora == "merged":
            return await engine.send_weights(_merged(actor), global_steps=global_steps) or {}
        if "dummy" in self.config.rollout.load_format and not getattr(self, "_verl_fl_base_sent", False):
            base, _ = actor.get_per_tensor_param(base_sync_done=False)
            await engine.send_weights(base, global_steps=global_steps, about={"more": True})
            self._verl_fl_base_sent = True
        return await engine.send_weights(weights, global_steps=global_steps, about={"lora": plain(adapter)}) or {}

    return update_weights


@patch(
    target="verl.checkpoint_engine.base:CheckpointEngineWorker.update_weights",
    why="the receiving end has no way to tell the inference server that an adapter comes, and with which config",
    reference="case lora-split; verl/checkpoint_engine/base.py",
    remove_when="receive_weights can hand on a peft_config",
)
def adapter_to_the_server(original: Callable) -> Callable:
    @functools.wraps(original)
    async def update_weights(self: Any, global_steps: int | None = None) -> None:
        receive = getattr(self.checkpoint_engine, "receive_with_about", None)
        if receive is None:
            return await original(self, global_steps)
        more = True
        while more:
            weights, about = await receive(global_steps=global_steps)
            adapter = about.get("lora")
            told = {} if adapter is None else {"peft_config": adapter, "base_sync_done": True}
            try:
                await self.server_adapter.update_weights(
                    weights, global_steps=global_steps, wire_format=self.checkpoint_engine.wire_format, **told
                )
            finally:
                await weights.aclose()
            more = bool(about.get("more"))

    return update_weights


@patch(
    target="verl.checkpoint_engine.base:CheckpointEngineManager.update_weights",
    why="a sync that fails leaves every replica paused, and its requests waiting, for as long as the job lives",
    reference="case stays-paused; verl/checkpoint_engine/base.py",
    remove_when="update_weights resumes its replicas after a failure too",
)
def replicas_answer_after_a_failed_sync(original: Callable) -> Callable:
    from verl.utils.ray_utils import auto_await

    async def update_weights(self: Any, global_steps: int | None = None) -> Any:
        try:
            found = original(self, global_steps=global_steps)
            return await found if inspect.isawaitable(found) else found
        except Exception:
            # Whether they then generate or refuse is for each to say: it knows which weights it has.
            for resume in (self.resume_kv_cache_replicas, self.resume_generation_replicas):
                try:
                    found = resume()
                    if inspect.isawaitable(found):
                        await found
                except Exception as error:
                    logger.warning("weight sync: after a failed sync a replica could not be resumed: %s", error)
            raise

    return functools.wraps(original)(auto_await(update_weights))


def _merged(engine: Any) -> Any:
    merged = getattr(engine, "_merged_lora_per_tensor_param", None)
    if merged is None:
        raise ValueError(
            f"{type(engine).__name__} can't merge a LoRA adapter for the sync\n"
            "  asked: checkpoint_engine.engine_kwargs.fl.lora=merged\n  legal: adapter"
        )
    return merged()


def plain(value: Any) -> Any:
    """``value`` as JSON can say it: an adapter's config has enums, sets and dtypes."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    value = getattr(value, "value", value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
