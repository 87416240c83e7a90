"""The connections of a sender, or of a relaying receiver, to the ends below it; they stay open between syncs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_fl.weight_sync._errors import SyncError
from verl_fl.weight_sync.edge import Edge, RingEdge, StreamEdge
from verl_fl.weight_sync.link import DATA, RING, Hello, Link, dial, host_id
from verl_fl.weight_sync.ring import SLOTS, Ring

logger = logging.getLogger("verl_fl.weight_sync")

TRANSPORTS = ("auto", "shm", "unix", "tcp")


@dataclass(frozen=True, slots=True)
class Below:
    """One end below: where it listens and how its bytes are to get there."""

    address: str
    host: str
    """See :func:`link.host_id`."""
    unix: str
    """Name of its unix socket; ``""``: it has none."""
    transport: str = "auto"

    @classmethod
    def parse(cls, value: Any) -> Below:
        """From a control frame's object.

        Raises:
            ValueError: it is none.
        """
        fields = [value[name] for name in ("address", "host", "unix", "transport")] if isinstance(value, dict) else []
        if len(fields) != 4 or not all(isinstance(field, str) for field in fields) or fields[3] not in TRANSPORTS:
            raise ValueError(f"{value!r} names no end below")
        return cls(*fields)

    def as_dict(self) -> dict[str, str]:
        """For a control frame."""
        return {"address": self.address, "host": self.host, "unix": self.unix, "transport": self.transport}

    def choose(self) -> str:
        """The fastest transport that both ends have, or the one that was asked for.

        Raises:
            SyncError: what was asked for can't be had.
        """
        here = bool(self.unix) and self.host == host_id()
        if self.transport == "auto":
            return "shm" if here else "tcp"
        if self.transport in ("shm", "unix") and not here:
            raise SyncError(
                f"transport {self.transport!r} was asked for, and the receiver is on another host or in another "
                "network namespace",
                phase="dial",
                peer=self.address,
                fix="ask for tcp or auto",
            )
        return self.transport


class Outlets:
    """Dials data connections once and keeps them, by address and transport.

    Args:
        session: random, of this end; all its connections carry it.
        lanes: sockets of one tcp or unix edge.
    """

    def __init__(self, session: bytes, rank: int, secret: bytes, *, lanes: int, timeout_s: float) -> None:
        self._session, self._rank, self.secret = session, rank, secret
        self._lanes, self._timeout_s = lanes, timeout_s
        self._links: dict[tuple[str, str], list[Link]] = {}
        self._ring: Ring | None = None

    def edges(
        self,
        below: Sequence[Below],
        sync: int,
        bucket_bytes: int,
        deadline: float,
        on_error: Callable[[BaseException], None],
        modes: Mapping[str, str] | None = None,
    ) -> tuple[list[Edge], dict[str, str]]:
        """The edges of one sync, and the transport by address; ends of different ``modes`` never share a ring.

        Raises:
            SyncError: an end can't be reached.
        """
        chosen = {end.address: end.choose() for end in below}
        for key in [key for key, links in self._links.items() if not all(link.is_open() for link in links)]:
            self._close(key)  # the end below was started anew
        wanted = {(end.address, chosen[end.address]): end for end in below}
        for key in [key for key in self._links if key not in wanted]:
            self._close(key)
        if self._ring is not None and self._ring.slot_bytes != bucket_bytes:
            self._close_ring()
        edges: list[Edge] = []
        shared: tuple[list[Link], list[Link]] = ([], [])
        for key, end in wanted.items():
            if key not in self._links:
                self._dial(key, end, bucket_bytes)
        for key, end in wanted.items():  # only now: an edge has threads, and dialing may fail
            links = self._links[key]
            delta = (modes or {}).get(end.address) == "delta"
            for link in links:
                link.deadline = deadline
            if key[1] == "shm":
                shared[delta].extend(links)
            else:
                edges.append(StreamEdge(key[1], sync, links, on_error, delta=delta))
        if any(shared):
            assert self._ring is not None
            edges.append(RingEdge(sync, self._ring, shared, on_error))
        return edges, chosen

    def close(self) -> None:
        """Close all connections. Idempotent; also what a failed sync does, so that no old bytes meet a new sync."""
        for key in list(self._links):
            self._close(key)
        self._close_ring()

    def _dial(self, key: tuple[str, str], end: Below, bucket_bytes: int) -> None:
        place = end.address if key[1] == "tcp" else f"unix:{end.unix}"
        links: list[Link] = []
        self._links[key] = links
        for lane in range(1 if key[1] == "shm" else self._lanes):
            link, _ = dial(place, Hello(DATA, self._session, self._rank, lane), self.secret, self._timeout_s)
            link.peer = end.address
            links.append(link)
        if key[1] == "shm":
            if self._ring is None:
                try:
                    self._ring = Ring.create(bucket_bytes)
                except OSError as error:
                    raise SyncError(
                        f"no shared memory for {SLOTS} buckets of {bucket_bytes} bytes: {error.strerror or error}",
                        phase="dial",
                        peer=end.address,
                        fix="use smaller buckets, or transport tcp",
                    ) from error
            links[0].send(RING, index=SLOTS, value=bucket_bytes)
            links[0].send_fd(self._ring.fd)
        logger.info("weight sync: %s to %s", key[1], end.address)

    def _close(self, key: tuple[str, str]) -> None:
        for link in self._links.pop(key, ()):
            link.close()

    def _close_ring(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            for key in [key for key in self._links if key[1] == "shm"]:
                self._close(key)
            ring.close()
