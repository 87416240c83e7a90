"""verl's checkpoint engine ``fl``: the trainer's ranks are senders, every rollout worker a receiver.

One sync is, as verl calls it: ``prepare`` on all (a receiver listens and says where), ``build_topology`` on the driver,
``init_process_group`` on all (who is who), ``send_weights`` and ``receive_weights``, ``finalize``. Connections and
buffers outlive the sync; a replica that comes or goes between two syncs changes nothing for the others.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from verl_fl._errors import explain
from verl_fl.weight_sync._errors import SyncError
from verl_fl.weight_sync.receiver import Receiver
from verl_fl.weight_sync.sender import BUCKET_BYTES, DELTA_BUCKET_BYTES, Sender

logger = logging.getLogger("verl_fl.weight_sync")

_KEY = "actor_rollout_ref.rollout.checkpoint_engine"
_NEXT = object()


@CheckpointEngineRegistry.register("fl")
class FLCheckpointEngine(CheckpointEngine):
    """verl's checkpoint engine ``fl``; the arguments after ``is_master`` are ``engine_kwargs.fl`` of the config.

    Args:
        bucket_size: bytes that may lie on one end while they wait for the other; what travels is cut finer.
        is_master: whether this is trainer rank 0.
        transport: ``auto``, ``tcp``, ``unix`` or ``shm``.
        topology: ``auto``, ``chain``, ``tree`` or ``star``: how receivers pass weights on.
        delta: send only what changed since the last sync. One copy of the weights in host memory on each end.
        on_failure: after a failed sync the rollout keeps the ``old`` weights (each receiver then holds a copy), or is
            ``paused``: it refuses requests, with the reason, until a sync succeeds.
        lora: a LoRA model's ``adapter`` alone, with its config, or the ``merged`` weights.
        lanes: sockets of each tcp or unix edge.
        bucket_bytes: what travels at once; None: 1 MiB, with deltas 4 MiB.
        ports: ``[first, last]``: where receivers may listen; None: anywhere.
        timeout_s: limit of each wait for a peer that makes no progress.
        sync_limit_s: limit of one sync.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        transport: str = "auto",
        topology: str = "auto",
        delta: bool = False,
        on_failure: str = "paused",
        lora: str = "adapter",
        lanes: int = 2,
        bucket_bytes: int | None = None,
        ports: Any = None,
        timeout_s: float = 60.0,
        sync_limit_s: float = 1800.0,
    ) -> None:
        check_bucket_size(bucket_size)
        if bucket_bytes is None:
            bucket_bytes = DELTA_BUCKET_BYTES if delta else BUCKET_BYTES
        _choice("what is the rollout to do after a failed sync?", "on_failure", on_failure, ("paused", "old"))
        _choice("what is sent of a LoRA model?", "lora", lora, ("adapter", "merged"))
        self.is_master, self.bucket_size, self.lora = is_master, bucket_size, lora
        limits = {"timeout_s": float(timeout_s), "sync_limit_s": float(sync_limit_s)}
        self._for_both: dict[str, Any] = {"lanes": lanes, "delta": bool(delta), **limits}
        self._for_sender: dict[str, Any] = {
            "transport": transport,
            "topology": topology,
            "bucket_bytes": min(bucket_bytes, bucket_size),
        }
        self._for_receiver: dict[str, Any] = {
            "keep_old": on_failure == "old",
            "ports": tuple(ports) if ports else None,
            "window_bytes": bucket_size,
        }
        # The options are read once, here, where an error still has the whole job's attention.
        Sender([], secret=bytes(32), **self._for_both, **self._for_sender)
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._is_sender = is_master

    def prepare(self) -> dict[str, Any]:
        """Listen, unless this end is known to send; what the driver needs to know."""
        if self._is_sender:
            return {}
        if self._receiver is None:
            import ray

            host = ray.util.get_node_ip_address().strip("[]")
            # Nobody can know this secret: the job's own comes with init_process_group.
            self._receiver = Receiver(secret=secrets.token_bytes(32), host=host, **self._for_both, **self._for_receiver)
        return {"address": self._receiver.address}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """All trainer ranks send; ranks of the senders, and for all the receivers' addresses and the job's secret."""
        global _secret
        _secret = _secret or secrets.token_hex(32)
        addresses = [data["address"] for data in metadata[actor_wg_world_size:]]
        shared = {"addresses": addresses, "num_ranks": actor_wg_world_size, "secret": _secret}

        def kwargs(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks} | {name: [value] * len(ranks) for name, value in shared.items()}

        return kwargs(list(range(actor_wg_world_size))), kwargs([-1] * rollout_world_size)

    # verl's **kwargs stand for the keys that build_topology returned.
    def init_process_group(  # type: ignore[override]
        self, rank: int, num_ranks: int, addresses: list[str], secret: str
    ) -> None:
        """Learn this end's role, and whom it meets."""
        if rank < 0:
            assert self._receiver is not None
            self._receiver.secret = secret
            return
        self._is_sender = True
        if self._receiver is not None:  # a trainer rank that did not know its role yet
            self._receiver.close()
            self._receiver = None
        if self._sender is None or (self._sender.rank, self._sender.num_ranks) != (rank, num_ranks):
            self._sender = Sender(
                [], secret=secret, rank=rank, num_ranks=num_ranks, **self._for_both, **self._for_sender
            )
        self._sender.addresses = addresses

    def finalize(self) -> None:
        """Nothing to give back: what stays open makes the next sync fast, and costs a few buckets of memory."""

    async def send_weights(
        self, weights: Any, global_steps: int | None = None, about: dict[str, Any] | None = None
    ) -> dict[str, float]:
        """Send this rank's share, drawing the generator in lockstep with the other ranks.

        Args:
            about: see :meth:`Sender.send`.

        Returns:
            Metrics under ``weight_sync/``; empty but on rank 0.

        Raises:
            SyncError: the sync failed; every end was told.
        """
        assert self._sender is not None
        version = -1 if global_steps is None else global_steps
        if hasattr(weights, "__aiter__"):
            loop = asyncio.get_running_loop()
            report = await asyncio.to_thread(_on_device_of(self._sender.send), _drawn(weights, loop), version, about)
        else:
            # In this thread: it has the device, the grad mode and whatever else the generator relies on.
            report = self._sender.send(weights, version, about)
        if not self.is_master:
            return {}
        logger.info("weight sync: %s", report)
        return report.metrics()

    # verl annotates a coroutine and iterates over it with `async for`.
    async def receive_weights(  # type: ignore[override]
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield each tensor once, in host memory, valid until the next; ends when every end knows the sync is whole.

        Raises:
            SyncError: it is not, or other weights came than those that were announced.
        """
        weights, _ = await self.receive_with_about(global_steps)
        async for item in weights:
            yield item

    async def receive_with_about(
        self, global_steps: int | None = None
    ) -> tuple[AsyncIterator[tuple[str, torch.Tensor]], dict[str, Any]]:
        """As :meth:`receive_weights`, and what the sender said of the weights; returns when the first has come."""
        assert self._receiver is not None
        stream = self._receiver.stream(self._for_both["timeout_s"] + self._for_both["sync_limit_s"])
        items = self._items(stream, -1 if global_steps is None else global_steps)
        first = await anext(items, _NEXT)

        async def all_items() -> AsyncIterator[tuple[str, torch.Tensor]]:
            try:
                if first is not _NEXT:
                    yield first  # type: ignore[misc]
                async for item in items:
                    yield item
            finally:
                await items.aclose()

        return all_items(), self._receiver.about

    async def _items(
        self, stream: Generator[tuple[str, torch.Tensor], None, None], version: int
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """The receiver's stream, drawn in a thread so that this loop stays free."""
        assert self._receiver is not None
        drawn: asyncio.Future[Any] | None = None
        try:
            while True:
                drawn = asyncio.ensure_future(asyncio.to_thread(next, stream, _NEXT))
                if (item := await asyncio.shield(drawn)) is _NEXT:
                    break
                yield item
        finally:
            if drawn is not None and not drawn.done():  # cancelled: the thread that draws must end before the stream
                self._receiver.abort("the rollout stopped taking the weights")
                await asyncio.wait([drawn])
            await asyncio.to_thread(stream.close)
        if self._receiver.version != version:
            raise SyncError(
                f"version {self._receiver.version} came where {version} was announced",
                phase="commit",
                peer=self._receiver.address,
            )


_secret = ""
"""Of this driver's jobs; it travels with Ray's calls."""


def check_bucket_size(bucket_size: int) -> None:
    """Raise where the config's buckets carry nothing.

    Raises:
        ValueError: it is below one byte.
    """
    if bucket_size < 1:
        raise ValueError(
            explain(
                "a bucket of no bytes carries nothing",
                asked=f"{_KEY}.update_weights_bucket_megabytes={bucket_size >> 20}",
                legal="1 or more",
                fix="256 suits most models",
            )
        )


def _choice(problem: str, name: str, asked: str, legal: tuple[str, ...]) -> None:
    if asked not in legal:
        raise ValueError(explain(problem, asked=f"{_KEY}.engine_kwargs.fl.{name}={asked!r}", legal=", ".join(legal)))


def _drawn(weights: Any, loop: asyncio.AbstractEventLoop) -> Iterator[tuple[str, torch.Tensor]]:
    """An asynchronous generator of ``loop``, drawn from another thread."""
    iterator = weights.__aiter__()

    async def draw() -> Any:
        return await anext(iterator, _NEXT)

    while (item := asyncio.run_coroutine_threadsafe(draw(), loop).result()) is not _NEXT:
        yield item


def _on_device_of(call: Any) -> Any:
    """``call`` for another thread, with this thread's current device: torch keeps one a thread."""
    accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if accelerator is None:
        return call
    module = torch.get_device_module(accelerator)
    index = module.current_device()

    def run(*args: Any) -> Any:
        module.set_device(index)
        return call(*args)

    return run
