"""The receiving end: listens, takes one sync at a time, verifies every byte, and passes on what others are to have."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch

from verl_fl.weight_sync import listener, manifest, sink
from verl_fl.weight_sync._errors import BadFrame, SyncError
from verl_fl.weight_sync._secret import job_secret
from verl_fl.weight_sync.incoming import Incoming, Kept
from verl_fl.weight_sync.link import BUCKET, CONTROL, RING, Frame, Link, answer, host_id
from verl_fl.weight_sync.outlets import Below, Outlets
from verl_fl.weight_sync.report import Report
from verl_fl.weight_sync.ring import Ring

logger = logging.getLogger("verl_fl.weight_sync")

_MAX_STRANGERS = 64
"""Connections that may be in the handshake at once."""


class Receiver:
    """Takes new weights into ``targets``, or hands them out as they come where there are none.

    Args:
        targets: tensors by name, on any device; they are written to in place. None: use :meth:`stream`.
        secret: of the job; the sender needs the same. None: the environment's ``VERL_FL_SECRET``.
        host: address to listen on; None: this node's own.
        ports: first and last port that may be taken, the first free one of them; None: any.
        timeout_s: limit of every wait for a peer without progress, inside a sync.
        sync_limit_s: limit of a whole sync.
        keep_old: a failed sync leaves the old weights in place (this costs a copy in host memory); else the receiver
            is ``incomplete`` until a later sync succeeds.
        delta: keep what deltas need: host memory for a copy of what does not lie in plain host memory already.
        window_bytes: of :meth:`stream`: what may wait here for its consumer.
        lanes: sockets to each end below this one, where it passes weights on.

    Raises:
        ValueError: an argument is none of its legal values.
        RuntimeError: no port is free, or the address is not this node's.
    """

    def __init__(
        self,
        targets: Mapping[str, torch.Tensor] | None = None,
        *,
        secret: bytes | str | None = None,
        host: str | None = None,
        ports: tuple[int, int] | None = None,
        timeout_s: float = 60.0,
        sync_limit_s: float = 1800.0,
        keep_old: bool = False,
        delta: bool = True,
        window_bytes: int = 256 << 20,
        lanes: int = 2,
    ) -> None:
        self._secret = job_secret(secret)
        self.timeout_s, self.sync_limit_s, self.delta = timeout_s, sync_limit_s, delta
        self.keep_old = keep_old
        self.id = secrets.token_bytes(16)
        self.sink: sink.Sink
        if targets is None:
            self.sink = sink.Stream(window_bytes=window_bytes, keep_old=keep_old, keep_copy=delta)
        else:
            self.sink = sink.Targets(targets, keep_old=keep_old, keep_copy=delta)
        self.state = "empty"
        """``empty``, ``whole``, or ``incomplete: why``; only whole weights may be used."""
        self.version = -1
        """Of the weights that are here; -1: none."""
        self.base = 0
        """Number of the sync whose result lies here; 0: nothing that a delta could start from."""
        self.about: dict[str, Any] = {}
        """What the sender of the last sync said of its weights."""
        self.speed = 0.0
        self.kept = Kept()
        self.events: queue.Queue[tuple[Link, Any]] = queue.Queue()
        self.outlets = Outlets(self.id, 0, self._secret, lanes=lanes, timeout_s=timeout_s)
        self.incoming: Incoming | None = None
        self._links: set[Link] = set()
        self._lock = threading.Lock()
        self._busy = threading.Lock()
        self._closing = False
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._listener = listener.Listener(host, ports, self._accepted)
        self.address = self._listener.address
        """``tcp://host:port``, for the sender."""

    @property
    def secret(self) -> bytes:
        """Of the job; connections that are made after a change need the new one."""
        return self._secret

    @secret.setter
    def secret(self, secret: bytes | str) -> None:
        self._secret = self.outlets.secret = job_secret(secret)

    @property
    def below(self) -> Below:
        """How this receiver names itself to the ends above it."""
        return Below(self.address, host_id(), self._listener.unix)

    def receive(self, timeout_s: float | None = None) -> Report:
        """Take one sync.

        Args:
            timeout_s: limit of the wait for a sender; None: none. Inside the sync the receiver's own limits hold.

        Returns:
            What came; the new weights are in place and verified, and every sender knows it.

        Raises:
            SyncError: no sender came, or the sync failed; :attr:`state` says what the weights are now.
        """
        with self._one_at_a_time():
            incoming = self.incoming = Incoming(self)
            try:
                if self._closing:
                    raise SyncError("the receiver was closed", phase="begin", peer=self.address)
                incoming.wait_for_senders(timeout_s)
                report = incoming.run()
            except BaseException as error:
                self._fail(incoming, error)
                raise
            finally:
                self.incoming = None
                for link in incoming.links():
                    link.deadline = float("inf")
                for event in incoming.later:
                    self.events.put(event)
            self.state, self.version, self.base = "whole", report.version, incoming.sync if self.delta else 0
            return report

    def stream(self, timeout_s: float | None = None) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Take one sync and yield each tensor once, in the sender's order, as a host tensor; valid until the next.

        The iteration ends when the sync is whole and every end knows it.

        Raises:
            SyncError: as :meth:`receive`, from the iteration.
        """
        if not isinstance(self.sink, sink.Stream):
            raise ValueError("this receiver has targets: call receive(), the weights are written into them")
        outcome: list[Report | BaseException] = []
        self.sink.begin(manifest.Manifest(64))

        def work() -> None:
            try:
                outcome.append(self.receive(timeout_s))
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=work, name="verl-fl-receive", daemon=True)
        thread.start()
        drawn = False
        try:
            yield from self.sink.items()
            drawn = True
        except GeneratorExit:
            self.abort("the consumer stopped drawing the weights")
            raise
        except SyncError:
            pass  # the thread has the same, and is awaited below
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            thread.join()
            if not drawn and outcome and isinstance(outcome[0], Report):  # it had arrived, and was not taken in
                self.state, self.base = "incomplete: the consumer stopped drawing the weights", 0
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        self.report = outcome[0]

    def abort(self, reason: str) -> None:
        """End the sync that runs, if any, from another thread; the senders are told the reason."""
        incoming = self.incoming
        if incoming is not None:
            incoming.failed(SyncError(reason, phase="consume", peer=self.address, tensor=self.sink.drawing))

    def close(self) -> None:
        """Stop listening and close all connections. Idempotent."""
        self._closing = True
        self._listener.close()
        self.abort("the receiver was closed")
        with self._lock:
            strangers = list(self._strangers)
        for sock in strangers:
            _shut(sock)
        self._drop_links(data_only=False)
        deadline = time.monotonic() + 5
        while (self._links or self._strangers) and time.monotonic() < deadline:
            time.sleep(0.005)

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- connections: one thread each ---

    def _accepted(self, sock: socket.socket, peer: str) -> None:
        with self._lock:
            # The one that has been silent for longest goes: silence must not keep the job's own ends out.
            oldest = next(iter(self._strangers)) if len(self._strangers) >= _MAX_STRANGERS else None
            if oldest is not None:
                del self._strangers[oldest]
                _shut(oldest)
            self._strangers[sock] = None
        try:
            threading.Thread(target=self._serve, args=(sock, peer), name="verl-fl-link", daemon=True).start()
        except RuntimeError as error:  # no thread is to be had
            self._strangers.pop(sock, None)
            sock.close()
            logger.warning("weight sync: %s refused a connection from %s: %s", self.address, peer, error)

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            try:
                link = answer(sock, self.id, self._secret, peer, min(self.timeout_s, 10.0))
            finally:
                with self._lock:
                    self._strangers.pop(sock, None)
        except (SyncError, OSError) as error:
            sock.close()
            logger.warning(
                "weight sync: %s refused a connection from %s: %s", self.address, peer, getattr(error, "problem", error)
            )
            return
        with self._lock:
            self._links.add(link)
        try:
            if not self._closing:
                assert link.hello is not None
                (self._serve_control if link.hello.kind == CONTROL else self._serve_data)(link)
        except BaseException as error:
            self.events.put((link, error))
        finally:
            link.close()
            with self._lock:
                self._links.discard(link)

    def _serve_control(self, link: Link) -> None:
        while True:
            self.events.put((link, link.receive(idle_s=None)))

    def _serve_data(self, link: Link) -> None:
        ring: Ring | None = None
        born_in = self.incoming
        following: Frame | None = None
        try:
            while True:
                frame = following or link.receive(idle_s=None)
                following = None
                incoming = self.incoming
                if frame.kind == RING and ring is None:
                    ring = Ring.adopt(link.receive_fd(), slot_bytes=frame.value, num_slots=frame.index)
                elif frame.kind == BUCKET and incoming is not None and frame.sync == incoming.sync:
                    incoming.take(link, frame, ring)
                    following = incoming.take_many(link, ring)
                else:
                    raise BadFrame(f"a frame of kind {frame.kind} outside of a sync", phase="buckets", peer=link.peer)
        except BaseException as error:
            incoming = self.incoming
            if incoming is not None and (link in incoming.data_links or born_in is incoming):
                incoming.failed(error)
            elif not isinstance(error, SyncError) or isinstance(error, BadFrame):
                logger.warning("weight sync: %s dropped %s: %s", self.address, link.peer, error)
        finally:
            if ring is not None:
                ring.close()

    # --- failure ---

    def _fail(self, incoming: Incoming, error: BaseException) -> None:
        incoming.stop(error)
        for link in incoming.links():
            link.close()
        self._drop_links(data_only=True)  # a sender that has begun another sync keeps its control connection
        self.sink.fail(error)
        incoming.settle()
        if incoming.wrote:
            self.base = 0
        if incoming.committing or (incoming.wrote and not self.keep_old):
            self.state = f"incomplete: {error}"

    def _drop_links(self, *, data_only: bool) -> None:
        """A failed sync may have left bytes on the way; with the connections they are gone."""
        with self._lock:
            links = [link for link in self._links if not data_only or not link.hello or link.hello.kind != CONTROL]
        for link in links:
            link.close()
        self.outlets.close()

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this receiver is in a sync already; receive() takes one at a time")
        try:
            yield
        finally:
            self._busy.release()


def _shut(sock: socket.socket) -> None:
    """End a connection; the thread that waits on it closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
