"""The trainer's end of the built-in rollout: verl's workers call it to sleep, wake and feed the server."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

WireTensor = tuple[str, torch.dtype, torch.Size, Any]


class ServerAdapter(BaseRollout):
    """Talks to the :class:`NativeServer` of this worker's replica; every trainer rank has its own."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self.sleep_level = 1
        self._dtype = PrecisionType.to_dtype(self.config.dtype)
        self._server: Any = None

    @property
    def server(self) -> Any:
        """The server's handle; it is started after this worker, so it is looked up at first use."""
        if self._server is None:
            self._server = ray.get_actor(f"native_server_{self.replica_rank}_0")
        return self._server

    async def resume(self, tags: list[str]) -> None:
        """Wake the server; the tags are one to it."""
        if self.config.free_cache_engine:
            await self.server.wake_up.remote(tags)

    async def release(self) -> None:
        """Put the server to sleep."""
        if self.config.free_cache_engine:
            await self.server.sleep.remote()

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: dict | None = None,
        base_sync_done: bool = False,
        **_: Any,
    ) -> None:
        """Send full weights, or with ``peft_config`` after the base an adapter, in buckets cast to the served dtype.

        All trainer ranks draw the generator in lockstep, since it gathers; each feeds its own replica.

        Raises:
            NotImplementedError: a delta stream, which needs the engine of a later release.
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(f"rollout 'native' takes wire_format='named_tensors', not {wire_format!r}")
        lora = _plain(peft_config) if peft_config is not None and base_sync_done else None
        limit_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        await self.server.start_weight_update.remote(None if peft_config and lora is None else global_steps, lora)
        try:
            pending: list[Any] = []
            async for bucket in self._buckets(weights, limit_bytes):
                pending.append(self.server.put_weights.remote(bucket))
                if len(pending) > 2:  # bounds the memory in flight
                    await pending.pop(0)
            for reference in pending:
                await reference
        except BaseException as error:
            # Else the server's engine would wait for the rest, and its requests with it.
            await self.server.fail_weight_update.remote(f"{type(error).__name__}: {error}")
            raise
        await self.server.finish_weight_update.remote()

    async def _buckets(self, weights: Any, limit_bytes: int) -> AsyncIterator[list[WireTensor]]:
        bucket: list[WireTensor] = []
        size = 0
        async for name, tensor in ensure_async_iterator(weights):
            wire = self._wire(name, tensor)
            if bucket and size + wire[3].nbytes > limit_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(wire)
            size += wire[3].nbytes
        if bucket:
            yield bucket

    def _wire(self, name: str, tensor: torch.Tensor) -> WireTensor:
        local = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        dtype = self._dtype if local.is_floating_point() else local.dtype
        # A copy even where nothing changes: a generator may restore what it lent (merged LoRA) before the bucket is
        # sent.
        local = local.detach().to("cpu", dtype, copy=True).contiguous()
        # numpy has no bfloat16: the bytes travel, and dtype and shape beside them
        return name, local.dtype, local.shape, local.view(-1).view(torch.uint8).numpy()


def _plain(value: Any) -> Any:
    """``value`` with enums and sets as strings and lists, so that the server needs no peft to read it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    return getattr(value, "value", value)
