"""What each method of ``weight_sync.py`` does in the sender and in a receiver: the yardsticks, gloo, ZeroMQ."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import _weight_sync_payloads as payloads
from _weight_sync_cluster import Job

METHODS = {
    "memcpy": ("_weight_sync_methods", "Memcpy", "torch"),
    "raw_tcp": ("_weight_sync_methods", "RawTcp", "torch"),
    "gloo-per-tensor": ("_weight_sync_methods", "GlooPerTensor", "torch"),
    "gloo-bucket": ("_weight_sync_methods", "GlooBucket", "torch"),
    "ray": ("_weight_sync_ray", "Ray", "ray"),
    "zmq": ("_weight_sync_methods", "ZmqTcp", "zmq"),
    "zmq-ipc": ("_weight_sync_methods", "ZmqIpc", "zmq"),
    "nixl": ("_weight_sync_rdma", "NixlTcp", "nixl._api"),
    "nixl-shm": ("_weight_sync_rdma", "NixlShm", "nixl._api"),
    "mooncake": ("_weight_sync_rdma", "Mooncake", "mooncake.engine"),
    "fl-tcp": ("_weight_sync_ours", "FlTcp", "verl_fl.weight_sync"),
    "fl-unix": ("_weight_sync_ours", "FlUnix", "verl_fl.weight_sync"),
    "fl-shm": ("_weight_sync_ours", "FlShm", "verl_fl.weight_sync"),
    "fl": ("_weight_sync_ours", "Fl", "verl_fl.weight_sync"),
}
"""Module and class of each method, and what it imports."""


def endpoint(method: str) -> Any:
    """The class that does a method's part in one process; ``fl`` takes any number of distinct uses after a colon."""
    module, name, _ = METHODS[method.partition(":")[0]]
    return getattr(importlib.import_module(module), name)


def variants(method: str) -> tuple[str, ...]:
    """Ways to tune a method; each is measured and the best counts."""
    return endpoint(method).variants


def unavailable(method: str) -> str:
    """Why a method cannot run here, as far as an import tells; empty where it can. To be called in a process of its
    own, since what it loads stays."""
    needs = METHODS[method][2]
    try:
        module = importlib.import_module(needs)
        if needs == "verl_fl.weight_sync":
            _ = module.Receiver, module.Sender
    except Exception as error:  # a library of another machine fails at import in many ways
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    return ""


class Endpoint:
    """One method's part in one process; built once, with connections and buffers, then used for every transfer."""

    variants: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self, job: Job) -> None:
        self.job = job
        if job.is_sender:
            self.open_sender()
        else:
            self.open_receiver()

    def open_sender(self) -> None:
        """Ready to send."""

    def open_receiver(self) -> None:
        """Ready to receive."""

    def sync(self, variant: str) -> None:
        """One transfer: afterwards a receiver's tensors are the sender's."""
        if self.job.is_sender:
            self.send(variant)
        else:
            self.receive(variant)

    def send(self, variant: str) -> None:
        """The sender's part."""
        raise NotImplementedError

    def receive(self, variant: str) -> None:
        """A receiver's part."""
        raise NotImplementedError

    def received(self) -> list[payloads.Tensors]:
        """What the last transfer brought to this process."""
        return [] if self.job.is_sender else [self.job.tensors]

    def close(self) -> None:
        """Nothing of the method is left."""


class Memcpy(Endpoint):
    """The sender copies its model into a second one; one thread, no process boundary."""

    def open_sender(self) -> None:
        self.copies = payloads.make(self.job.payload, None)

    def send(self, variant: str) -> None:
        for view, source in zip(self.targets(), payloads.storages(self.job.tensors), strict=True):
            view.copy_(source)

    def targets(self) -> list[Any]:
        """The second model's storages."""
        return payloads.storages(self.copies)

    def receive(self, variant: str) -> None:
        """Nothing to do."""

    def received(self) -> list[payloads.Tensors]:
        return [self.copies] if self.job.is_sender else []


class Streams(Endpoint):
    """Connections from the sender to each receiver, and a thread for each."""

    num_streams: ClassVar[int] = 4

    def open_sender(self) -> None:
        self.sockets: list[list[socket.socket]] = []
        for (port,) in self.job.hear():
            streams = [socket.create_connection(("127.0.0.1", port)) for _ in range(self.num_streams)]
            for stream in streams:
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sockets.append(streams)
        self.pool = ThreadPoolExecutor(self.num_streams * self.job.num_receivers)

    def open_receiver(self) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=self.num_streams) as server:
            server.settimeout(self.job.timeout_s)
            self.job.tell((server.getsockname()[1],))
            self.sockets = [[server.accept()[0] for _ in range(self.num_streams)]]
        self.pool = ThreadPoolExecutor(self.num_streams)

    def close(self) -> None:
        for stream in itertools.chain.from_iterable(self.sockets):
            stream.close()


class RawTcp(Streams):
    """The speed of the link: one reused buffer into one reused buffer, no tensors, nothing checked."""

    variants = ("2 x 512 KB", "2 x 1 MB", "4 x 512 KB", "4 x 1 MB")

    def sync(self, variant: str) -> None:
        num_streams, block = _streams(variant)
        share = -(-self.job.payload.size_bytes // num_streams)
        move = _send_blocks if self.job.is_sender else _receive_blocks
        streams = [stream for peer in self.sockets for stream in peer[:num_streams]]
        list(self.pool.map(move, streams, itertools.repeat(share), itertools.repeat(block)))

    def received(self) -> list[payloads.Tensors]:
        return []


def _streams(variant: str) -> tuple[int, int]:
    """Number of streams and bytes of a block: ``2 x 512 KB``."""
    count, _, amount, unit = variant.split()
    return int(count), int(amount) << (10 if unit == "KB" else 20)


def _send_blocks(stream: socket.socket, total: int, block: int) -> None:
    buffer = memoryview(bytearray(block))
    while total:
        part = buffer[: min(block, total)]
        stream.sendall(part)
        total -= len(part)


def _receive_blocks(stream: socket.socket, total: int, block: int) -> None:
    buffer = memoryview(bytearray(block))
    while total:
        received = stream.recv_into(buffer, min(block, total))
        if not received:
            raise ConnectionError("the sender is gone")
        total -= received


class Gloo(Endpoint):
    """A gloo group of the sender (rank 0) and all receivers, on the loopback address."""

    def open_sender(self) -> None:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.job.tell(store.port)
        self.open_group(store, 0)

    def open_receiver(self) -> None:
        import torch.distributed as dist

        (port,) = self.job.hear()
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.open_group(store, self.job.rank + 1)

    def open_group(self, store: Any, rank: int) -> None:
        """Join the group and prepare the buffers."""
        from datetime import timedelta

        import torch.distributed as dist

        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=self.job.timeout_s)
        self.group = dist.ProcessGroupGloo(store, rank, self.job.num_receivers + 1, options)
        self.storages = payloads.storages(self.job.tensors)


class GlooPerTensor(Gloo):
    """One broadcast a tensor, and a copy into the receiver's model: the way verl-FL takes."""

    def open_group(self, store: Any, rank: int) -> None:
        import torch

        super().open_group(store, rank)
        scratch = torch.zeros(max(view.numel() for view in self.storages), dtype=torch.uint8)
        self.scratch = [scratch[: view.numel()] for view in self.storages]

    def send(self, variant: str) -> None:
        for view in self.storages:
            self.group.broadcast(view, 0).wait()

    def receive(self, variant: str) -> None:
        for view, buffer in zip(self.storages, self.scratch, strict=True):
            self.group.broadcast(buffer, 0).wait()
            view.copy_(buffer)


class GlooBucket(Gloo):
    """Tensors packed into buckets, two in turn, so that packing overlaps the broadcast."""

    variants = ("4 MB", "16 MB", "64 MB")

    def open_group(self, store: Any, rank: int) -> None:
        super().open_group(store, rank)
        self.plans = {variant: _plan(self.storages, int(variant.split()[0]) << 20) for variant in self.variants}

    def send(self, variant: str) -> None:
        running: list[Any] = []
        for bucket, parts in self.plans[variant]:
            if len(running) == 2:
                running.pop(0).wait()
            for view, packed in parts:
                packed.copy_(view)
            running.append(self.group.broadcast(bucket, 0))
        for work in running:
            work.wait()

    def receive(self, variant: str) -> None:
        plan = self.plans[variant]
        running = [self.group.broadcast(bucket, 0) for bucket, _ in plan[:2]]
        for index, (_, parts) in enumerate(plan):
            running.pop(0).wait()
            for view, packed in parts:
                view.copy_(packed)
            if index + 2 < len(plan):
                running.append(self.group.broadcast(plan[index + 2][0], 0))


def _plan(storages: list[Any], capacity: int) -> list[tuple[Any, list[tuple[Any, Any]]]]:
    """The buckets in turn, each with the pieces of the model that go into it and where."""
    import torch

    memory = [torch.zeros(capacity, dtype=torch.uint8) for _ in range(2)]
    plan: list[tuple[Any, list[tuple[Any, Any]]]] = []
    parts: list[tuple[Any, Any]] = []
    used = 0
    for view in storages:
        while view.numel():
            bucket = memory[len(plan) % 2]
            piece, view = view[: capacity - used], view[capacity - used :]
            parts.append((piece, bucket[used : used + piece.numel()]))
            used += piece.numel()
            if used == capacity:
                plan.append((bucket, parts))
                parts, used = [], 0
    if parts:
        plan.append((memory[len(plan) % 2][:used], parts))
    return plan


class Zmq(Endpoint):
    """PUSH to PULL, several sockets in parallel, frames that are views of the sender's tensors.

    Frames are pieces of tensors: a multipart message of whole ones reaches the receiver when all of it lies in memory
    there, which is slower at 269 MB and a second model of memory.
    """

    variants = ("1 x 512 KB", "1 x 1 MB", "2 x 512 KB", "2 x 1 MB")
    num_streams: ClassVar[int] = 2

    def open_sender(self) -> None:
        import zmq

        self.context = zmq.Context(io_threads=self.num_streams)
        self.buffers = payloads.buffers(self.job.tensors)
        self.sockets = []
        for addresses in self.job.hear():
            streams = [self.context.socket(zmq.PUSH) for _ in addresses]
            for stream, address in zip(streams, addresses, strict=True):
                stream.set(zmq.SNDHWM, 16)  # bounds what waits; the memory is the tensors' own
                stream.set(zmq.LINGER, 0)
                stream.connect(address)
            self.sockets.append(streams)
        self.pool = ThreadPoolExecutor(self.num_streams * self.job.num_receivers)

    def open_receiver(self) -> None:
        import zmq

        self.context = zmq.Context(io_threads=self.num_streams)
        self.buffers = payloads.buffers(self.job.tensors)
        self.sockets = [[self.context.socket(zmq.PULL) for _ in range(self.num_streams)]]
        addresses = []
        for stream in self.sockets[0]:
            stream.set(zmq.RCVHWM, 16)
            stream.set(zmq.RCVTIMEO, int(self.job.timeout_s * 1000))
            stream.bind(self.address())
            addresses.append(stream.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
        self.job.tell(addresses)
        self.pool = ThreadPoolExecutor(self.num_streams)

    def address(self) -> str:
        """To bind a socket to."""
        raise NotImplementedError

    def sync(self, variant: str) -> None:
        num_streams, _ = _streams(variant)
        pieces = _pieces(self.buffers, variant)
        move = _push if self.job.is_sender else _pull
        streams = [(stream, index) for peer in self.sockets for index, stream in enumerate(peer[:num_streams])]
        list(self.pool.map(lambda item: move(item[0], pieces[item[1] :: num_streams]), streams))

    def close(self) -> None:
        self.context.destroy(linger=0)


class ZmqTcp(Zmq):
    """Over TCP."""

    def address(self) -> str:
        return "tcp://127.0.0.1:*"


class ZmqIpc(Zmq):
    """Over unix sockets in the abstract namespace, which leave no file."""

    def address(self) -> str:
        import uuid

        return f"ipc://@weight-sync-{uuid.uuid4().hex}"


def _pieces(buffers: list[memoryview], variant: str) -> list[memoryview]:
    """The model as the frames of a variant."""
    _, block = _streams(variant)
    return [buffer[start : start + block] for buffer in buffers for start in range(0, len(buffer), block)]


def _push(stream: Any, pieces: list[memoryview]) -> None:
    for piece in pieces:
        stream.send(piece, copy=False)


def _pull(stream: Any, pieces: list[memoryview]) -> None:
    for piece in pieces:
        piece[:] = stream.recv(copy=False).buffer
