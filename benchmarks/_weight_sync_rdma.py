"""The rivals that write into registered remote memory: NIXL over UCX, Mooncake's transfer engine."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import _weight_sync_payloads as payloads
from _weight_sync_methods import Endpoint


class Nixl(Endpoint):
    """The sender writes its tensors into the receiver's; descriptors and connections are prepared once."""

    transports: ClassVar[str]
    """UCX's, as UCX_TLS names them."""

    def open_agent(self) -> None:
        """An agent with this process's tensors registered."""
        from nixl._api import nixl_agent, nixl_agent_config

        os.environ["UCX_TLS"] = self.transports  # read when the agent makes its UCX context
        os.environ["UCX_NET_DEVICES"] = "lo"
        name = f"{type(self).__name__}-{self.job.role}-{self.job.rank}"
        # Without its progress thread, which would spin on a core while other methods have their turn; the loops below
        # drive both ends.
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.storages = payloads.storages(self.job.tensors)
        self.memory = self.agent.register_memory(self.storages)

    def open_receiver(self) -> None:
        self.open_agent()
        descriptors = self.agent.get_serialized_descs(self.agent.get_xfer_descs(self.storages))
        self.job.tell((self.agent.get_agent_metadata(), descriptors))
        (sender,) = self.job.hear()
        self.sender = self.agent.add_remote_agent(sender)
        self.sender = self.sender.decode() if isinstance(self.sender, bytes) else self.sender

    def open_sender(self) -> None:
        self.open_agent()
        self.transfers = []
        for metadata, descriptors in self.job.hear():
            peer = self.agent.add_remote_agent(metadata)
            peer = peer.decode() if isinstance(peer, bytes) else peer
            local, remote = self.agent.get_xfer_descs(self.storages), self.agent.deserialize_descs(descriptors)
            self.transfers.append(self.agent.initialize_xfer("WRITE", local, remote, peer, b"done"))
        self.job.tell(self.agent.get_agent_metadata())

    def send(self, variant: str) -> None:
        states = [self.agent.transfer(transfer, b"done") for transfer in self.transfers]
        while "PROC" in states:
            os.sched_yield()
            states = [self.agent.check_xfer_state(transfer) for transfer in self.transfers]
        if "ERR" in states:
            raise RuntimeError("NIXL reports a failed transfer")

    def receive(self, variant: str) -> None:
        import time

        deadline = time.monotonic() + self.job.timeout_s
        while not self.agent.get_new_notifs():
            os.sched_yield()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no notification of NIXL in {self.job.timeout_s:g} s")

    def close(self) -> None:
        for transfer in getattr(self, "transfers", []):
            self.agent.release_xfer_handle(transfer)
        self.agent.deregister_memory(self.memory)


class NixlTcp(Nixl):
    """UCX over TCP on the loopback device."""

    transports = "tcp"


class NixlShm(Nixl):
    """UCX over shared memory, cross-memory attach included where the kernel allows it."""

    transports = "shm,tcp"  # UCX makes its connections over the second


class Mooncake(Endpoint):
    """Mooncake's transfer engine over TCP: one batched write of all tensors to each receiver."""

    def open_engine(self) -> None:
        """An engine with this process's tensors registered; it picks its own port."""
        from mooncake.engine import TransferEngine

        self.engine: Any = TransferEngine()
        if status := self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError(f"Mooncake's initialize returned {status}")
        views = payloads.storages(self.job.tensors)
        self.addresses = [view.data_ptr() for view in views]
        self.lengths = [view.numel() for view in views]
        if status := self.engine.batch_register_memory(self.addresses, self.lengths):
            raise RuntimeError(f"Mooncake's batch_register_memory returned {status}")

    def open_receiver(self) -> None:
        self.open_engine()
        self.job.tell((f"127.0.0.1:{self.engine.get_rpc_port()}", self.addresses))

    def open_sender(self) -> None:
        self.open_engine()
        self.peers = self.job.hear()

    def send(self, variant: str) -> None:
        write = self.engine.batch_transfer_async_write
        batches = [write(name, self.addresses, addresses, self.lengths) for name, addresses in self.peers]
        if 0 in batches:
            raise RuntimeError("Mooncake accepted no batch")
        if status := self.engine.get_batch_transfer_status(batches):
            raise RuntimeError(f"Mooncake's transfer ended with status {status}")
        self.job.tell("done")

    def receive(self, variant: str) -> None:
        self.job.hear()
