"""verl-fl's own weight sync, bare: ``Sender`` and ``Receiver`` with an address, no verl, no Ray."""

from __future__ import annotations

from typing import Any, ClassVar

import _weight_sync_payloads as payloads
from _weight_sync_methods import Endpoint

SECRET = b"the secret of this benchmark only"


class Fl(Endpoint):
    """One use of the API.

    Args:
        receivers: how many of the receivers take part; all where None.
        senders: how many of the senders take part.
        delta: only changes travel.
        own: the receivers have a set of tensors for this use alone; a receiver whose tensors others wrote to has
            nothing that a delta could start from.
        transport: as ``Sender`` names it.
    """

    def __init__(
        self,
        job: Any,
        receivers: int | None = None,
        senders: int = 1,
        delta: bool = False,
        own: bool = False,
        transport: str = "tcp",
    ) -> None:
        self.num_receivers = job.num_receivers if receivers is None else receivers
        self.num_senders, self.delta, self.transport = senders, delta, transport
        self.idle = job.rank >= (senders if job.is_sender else self.num_receivers)
        self.version = 0
        self.tensors = payloads.make(job.payload, None) if own and not job.is_sender else job.tensors
        super().__init__(job)

    def open_receiver(self) -> None:
        from verl_fl.weight_sync import Receiver

        address = ""
        if not self.idle:
            self.receiver = Receiver(self.tensors, secret=SECRET, host=self.job.host)
            address = self.receiver.address
        self.job.tell(address)

    def open_sender(self) -> None:
        from verl_fl.weight_sync import Sender

        addresses = [address for address in self.job.hear() if address]
        if self.idle:
            return
        options: dict[str, Any] = {"transport": self.transport}
        if self.num_senders > 1:
            options |= {"rank": self.job.rank, "num_ranks": self.num_senders}
        if self.delta:
            options["delta"] = True
        self.sender = Sender(addresses, secret=SECRET, **options)

    def send(self, variant: str) -> None:
        self.version += 1
        if not self.idle:
            self.sender.send(self.tensors, version=self.version)

    def receive(self, variant: str) -> None:
        if not self.idle:
            self.receiver.receive(timeout_s=self.job.timeout_s)

    def received(self) -> list[payloads.Tensors]:
        return [] if self.idle or self.job.is_sender else [self.tensors]

    def close(self) -> None:
        for side in ("sender", "receiver"):
            if hasattr(self, side):
                getattr(self, side).close()


class _OnOneHost(Fl):
    name: ClassVar[str]

    def __init__(self, job: Any) -> None:
        super().__init__(job, transport=self.name)


class FlTcp(_OnOneHost):
    """Over TCP."""

    name = "tcp"


class FlUnix(_OnOneHost):
    """Over unix sockets."""

    name = "unix"


class FlShm(_OnOneHost):
    """Over shared memory."""

    name = "shm"
