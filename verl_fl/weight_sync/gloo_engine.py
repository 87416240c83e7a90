"""The plain baseline: trainer rank 0 broadcasts buckets through host memory to every rollout worker, over gloo.

One sync is: prepare on all, a group of its own, then for each bucket a JSON manifest and the bytes, an empty manifest
at the end, finalize. No pickle crosses the socket, and a sync whose manifest does not end in order is an error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from verl_fl.weight_sync.engine import check_bucket_size

_ALIGN = 64
Entry = tuple[str, str, list[int], int]
"""Name, dtype, shape, offset in the bucket in bytes."""


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """verl's checkpoint engine ``gloo``.

    Args:
        bucket_size: bytes of one bucket; a larger tensor travels in a bucket of its own.
        is_master: whether this is trainer rank 0, which sends.
        timeout_s: limit of each wait for a peer.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = 600.0) -> None:
        check_bucket_size(bucket_size)
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.timeout = timedelta(seconds=timeout_s)
        self._store: dist.TCPStore | None = None
        self._group: Any = None

    def prepare(self) -> dict[str, Any]:
        """The master opens its store on this node's own address, on a port that is held until :meth:`finalize`."""
        self._group = self._store = None  # what a failed sync left behind
        if not self.is_master:
            return {}
        import ray

        host = ray.util.get_node_ip_address().strip("[]")
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self.timeout)
        return {"host": host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 is the trainer's first, 1 and up are the rollout workers; other trainer ranks only gather (-1)."""
        world_size = rollout_world_size + 1
        trainer_ranks = [0] + [-1] * (actor_wg_world_size - 1)
        rollout_ranks = list(range(1, world_size))

        def kwargs(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "world_size": [world_size] * len(ranks), "master": [metadata[0]] * len(ranks)}

        return kwargs(trainer_ranks), kwargs(rollout_ranks)

    # verl's **kwargs stand for the keys that build_topology returned.
    def init_process_group(  # type: ignore[override]
        self, rank: int, world_size: int, master: dict[str, Any]
    ) -> None:
        """Join this sync's own group; a trainer rank that only gathers joins none."""
        self.rank = rank
        if rank < 0:
            return
        if self._store is None:
            self._store = dist.TCPStore(master["host"], master["port"], is_master=False, timeout=self.timeout)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("verl_fl", self._store), rank, world_size, self.timeout)

    def finalize(self) -> None:
        """Leave the group and close the store."""
        self._group = self._store = None

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Draw all weights, in lockstep with the other trainer ranks, and broadcast them if this is rank 0.

        Returns:
            ``weight_sync/bytes``: bytes sent to each receiver (0 on other ranks).
        """
        sent = 0
        bucket = _Bucket(self.bucket_size)
        async for name, tensor in ensure_async_iterator(weights):
            if self.rank != 0:
                continue
            local = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if not bucket.fits(local):
                sent += await self._broadcast_bucket(bucket)
                bucket = _Bucket(self.bucket_size)
            bucket.add(name, local)
        if self.rank == 0:
            if bucket.entries:
                sent += await self._broadcast_bucket(bucket)
            await self._send_manifest([])
        return {"weight_sync/bytes": float(sent)}

    # verl annotates a coroutine and iterates over it with `async for`.
    async def receive_weights(  # type: ignore[override]
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield each tensor once, as a view of its bucket.

        Raises:
            RuntimeError: the stream ended without a single tensor.
        """
        count = 0
        while entries := await self._receive_manifest():
            name, dtype, shape, offset = entries[-1]
            buffer = torch.empty(offset + _num_bytes(dtype, shape), dtype=torch.uint8)
            await self._broadcast(buffer)
            for name, dtype, shape, offset in entries:
                raw = buffer[offset : offset + _num_bytes(dtype, shape)]
                yield name, raw.view(getattr(torch, dtype)).view(shape)
                count += 1
        if count == 0:
            raise RuntimeError("the weight sync carried no tensor; the trainer's model has no parameters to send")

    async def _broadcast_bucket(self, bucket: _Bucket) -> int:
        await self._send_manifest(bucket.entries)
        payload = bucket.pack()
        await self._broadcast(payload)
        return payload.numel()

    async def _send_manifest(self, entries: list[Entry]) -> None:
        manifest = torch.frombuffer(bytearray(json.dumps(entries).encode()), dtype=torch.uint8)
        await self._broadcast(torch.tensor([manifest.numel()]))
        await self._broadcast(manifest)

    async def _receive_manifest(self) -> list[Entry]:
        size = torch.zeros(1, dtype=torch.int64)
        await self._broadcast(size)
        manifest = torch.empty(int(size), dtype=torch.uint8)
        await self._broadcast(manifest)
        return json.loads(bytes(manifest.numpy()))

    async def _broadcast(self, tensor: torch.Tensor) -> None:
        if tensor.numel() == 0:
            return
        await asyncio.to_thread(self._group.broadcast(tensor, 0).wait)


class _Bucket:
    """Tensors on their way out, each at a multiple of 64 bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: list[Entry] = []
        self._tensors: list[torch.Tensor] = []
        self._end = 0

    def fits(self, tensor: torch.Tensor) -> bool:
        return not self.entries or _aligned(self._end) + tensor.nbytes <= self.capacity

    def add(self, name: str, tensor: torch.Tensor) -> None:
        # A copy: a generator may restore what it lent (merged LoRA) before the bucket is sent.
        local = tensor.detach().to("cpu", copy=True).contiguous()
        offset = _aligned(self._end)
        self.entries.append((name, str(local.dtype).removeprefix("torch."), list(local.shape), offset))
        self._tensors.append(local)
        self._end = offset + local.nbytes

    def pack(self) -> torch.Tensor:
        payload = torch.zeros(self._end, dtype=torch.uint8)
        for (_, _, _, offset), tensor in zip(self.entries, self._tensors, strict=True):
            payload[offset : offset + tensor.nbytes] = tensor.view(-1).view(torch.uint8)
        return payload


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _num_bytes(dtype: str, shape: list[int]) -> int:
    return getattr(torch, dtype).itemsize * torch.Size(shape).numel()
