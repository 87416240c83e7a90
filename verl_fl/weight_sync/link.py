"""One authenticated socket between two ends, and the frames on it. Every wait has a limit; see docs/weight-sync.md."""

from __future__ import annotations

import array
import contextlib
import ctypes
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from verl_fl.weight_sync import pump
from verl_fl.weight_sync._errors import BadFrame, Refused, SyncError
from verl_fl.weight_sync.ring import Ring

PROTOCOL = 1
MAX_META_BYTES = 64 << 20
"""Of the part of a frame that is parsed: a manifest of half a million tensors."""

# Kinds of connection.
CONTROL, DATA = 1, 2
# Kinds of frame.
BEGIN, STATE, PLAN, READY, MANIFEST, END, CONFIRM, COMMIT, DONE, ERROR, BUSY = range(1, 12)
BUCKET, RELEASE, RING = 16, 17, 18
# Flags of a bucket.
DELTA, IN_RING, TRAILER = 1, 2, 4

_HELLO = struct.Struct("<4sHBB16sIHH32s")
_ANSWER = struct.Struct("<4sHBB16s8x32s")
_FRAME = struct.Struct("<4sBBHQQQQIIQQ")
_PROOF_BYTES = 32
_TICK_S = 0.5
_IOV_MAX = 512
_RUN = 64
"""Buckets that a compiled loop moves before it looks up."""
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
Buffer = Any
"""Whatever has the buffer protocol."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What the dialing end says of itself."""

    kind: int
    session: bytes
    """16 random bytes of the sender or relay that dials; all its connections carry the same."""
    rank: int = 0
    lane: int = 0


@dataclass(slots=True)
class Frame:
    """A frame's header; ``meta`` has been read and checked, the payload not yet."""

    kind: int
    sync: int
    size: int = 0
    """Payload bytes that follow the header and meta."""
    index: int = 0
    value: int = 0
    flags: int = 0
    checksum: int = 0
    meta: bytes = b""

    def json(self) -> dict[str, Any]:
        """``meta`` as an object.

        Raises:
            BadFrame: it is none.
        """
        try:
            value = json.loads(self.meta)
        except (ValueError, RecursionError) as error:
            raise BadFrame("a control frame is not JSON", phase="frame") from error
        if not isinstance(value, dict):
            raise BadFrame("a control frame is no object", phase="frame")
        return value

    def as_error(self, peer: str, phase: str) -> SyncError:
        """What an ERROR frame says, as the error of this end."""
        body = self.json()
        return SyncError(
            f"{peer} says: {body.get('error')}",
            phase=str(body.get("phase") or phase),
            peer=peer,
            tensor=str(body.get("tensor") or ""),
        )


class Link:
    """A connected socket after its handshake.

    Args:
        sock: connected; the link owns it.
        peer: the other end, for messages.
        timeout_s: limit of any wait without progress inside a frame.
    """

    def __init__(self, sock: socket.socket, peer: str, timeout_s: float) -> None:
        self.peer, self.timeout_s = peer, timeout_s
        self.transport = "unix" if sock.family == socket.AF_UNIX else "tcp"
        self.hello: Hello | None = None
        self.closed = False
        self.deadline = float("inf")
        """Monotonic time after which every wait fails, progress or not."""
        self._sock = sock
        self._header = bytearray(_FRAME.size)
        self._limit = 0.0
        # The kernel's own timeouts keep the socket blocking: no poll before each call, and a tick to look at limits.
        tick = struct.pack("@ll", int(_TICK_S), int(_TICK_S % 1 * 1e6))
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def is_open(self) -> bool:
        """Whether neither end has closed it; only for a link on which nothing is due."""
        try:
            return not self.closed and bool(self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Close; a thread that waits on the link is woken with an error. Idempotent."""
        self.closed = True
        with contextlib.suppress(OSError):  # not connected any more
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    # --- frames ---

    def send(self, kind: int, sync: int = 0, body: dict[str, Any] | bytes = b"", **fields: int) -> None:
        """Send a frame without payload."""
        self.send_frame(Frame(kind, sync, meta=json.dumps(body).encode() if isinstance(body, dict) else body, **fields))

    def send_frame(self, frame: Frame, payload: Sequence[Buffer] = ()) -> None:
        """Send a header, its meta, and the payload's parts in order, straight from where they lie."""
        head = _pack(frame)
        self._send_all([head, *payload] if frame.size else [head])

    def receive(self, *, idle_s: float | None = 0.0) -> Frame:
        """Read the next header and meta; the payload is then read with :meth:`read_into`.

        Args:
            idle_s: limit of the wait for the frame's first byte; 0: the link's own, None: none.
        """
        self._read_all([self._header], idle_s=self.timeout_s if idle_s == 0.0 else idle_s)
        return self._rest_of_frame()

    def _rest_of_frame(self) -> Frame:
        magic, kind, flags, _, sync, size, index, value, meta_size, _, checksum, check = _FRAME.unpack(self._header)
        if magic != b"VFLF":
            raise BadFrame("bytes that are no frame", phase="frame", peer=self.peer)
        if meta_size > MAX_META_BYTES:
            raise BadFrame(f"a frame claims {meta_size} bytes of meta", phase="frame", peer=self.peer)
        meta = bytearray(meta_size)
        if meta_size:
            self._read_all([meta])
        if check != _header_check(self._header, meta):
            raise BadFrame("a frame's header arrived damaged", phase="frame", peer=self.peer)
        return Frame(kind, sync, size, index, value, flags, checksum, bytes(meta))

    def read_into(self, parts: Sequence[Buffer]) -> None:
        """Fill ``parts`` in order with the next bytes, straight into where they lie."""
        self._read_all(parts)

    def send_fd(self, fd: int) -> None:
        """Hand a file descriptor to the other end of a unix socket."""
        try:
            self._sock.sendmsg([b"\x01"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        except OSError as error:
            raise self._broken(error) from error

    def receive_fd(self) -> int:
        """The descriptor that :meth:`send_fd` sent; the caller owns it.

        Raises:
            BadFrame: none came.
        """
        fds, limit = array.array("i"), time.monotonic() + self.timeout_s
        while True:
            try:
                _, ancillary, _, _ = self._sock.recvmsg(1, socket.CMSG_SPACE(4 * fds.itemsize), _CLOEXEC)
                break
            except BlockingIOError:
                self._check(limit, "sent nothing more")
            except OSError as error:
                raise self._broken(error) from error
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        for extra in fds[1:]:
            os.close(extra)
        if not fds:
            raise BadFrame("shared memory was announced and did not come", phase="buckets", peer=self.peer)
        return fds[0]

    # --- whole runs of buckets, moved by compiled loops ---

    def send_buckets(self, layout: pump.Layout, sync: int, buckets: Sequence[int]) -> None:
        """Send buckets from where ``layout`` says that they lie."""
        progress, at = pump.Progress(), ctypes.c_int64()
        index = (ctypes.c_uint64 * len(buckets))(*buckets)
        before = (-1, -1)
        with self.own_descriptor() as fd:
            hasher = pump.Hasher()
            while at.value < len(buckets):
                code = pump.send(fd, hasher, layout, sync, index, min(len(buckets), at.value + _RUN), at, progress)
                before = self.pumped(code, before, (at.value, progress.at), "took no more bytes")

    def receive_buckets(
        self, layout: pump.Layout, sync: int, ring: Ring | None, moved: Callable[[int], bool]
    ) -> Frame | None:
        """Receive buckets to where ``layout`` says that they go; each is verified.

        Args:
            moved: told now and then how many buckets have come since; whether to go on.

        Returns:
            A frame that is no whole bucket of this sync, or None after the last bucket.

        Raises:
            SyncError: as :meth:`read_into`.
            BadFrame: a bucket that can't be, or that comes twice.
            pump.Damaged: its bytes are not what its checksum says.
        """
        progress, got = pump.Progress(), ctypes.c_int64()
        memory = ring.describe() if ring is not None else (0, 0, 0)
        before = (-1, -1)
        with self.own_descriptor() as fd:
            hasher = pump.Hasher()
            while True:
                got.value = 0
                code = pump.receive(fd, hasher, layout, sync, memory, _RUN, got, progress)
                go_on = moved(got.value)
                if code == pump.STRANGE:
                    self._header[:] = bytes(progress.header)
                    return self._rest_of_frame()
                if not go_on and not progress.inside and not progress.at:
                    return None
                if code in pump.REASONS:
                    pump.refuse(code, progress, self.peer)
                if code == pump.CLOSED:
                    raise SyncError("the peer closed the connection", phase="wait", peer=self.peer)
                idle = code == pump.TICK and not progress.inside and not progress.at
                now = (-1, -1) if idle else (progress.bucket, progress.at)
                before = self.pumped(code, (-2, -2) if idle else before, now, "sent nothing more")

    def pumped(self, code: int, before: tuple[int, int], now: tuple[int, int], what: str) -> tuple[int, int]:
        """After a loop has returned: its error, or its limits."""
        if code > 0:
            raise self._broken(OSError(code, os.strerror(code)))
        if before != now:
            self._limit = time.monotonic() + self.timeout_s
        self._check(self._limit, what)
        return now

    @contextlib.contextmanager
    def own_descriptor(self) -> Iterator[int]:
        """One that :meth:`close` does not close: its number can't be another file's while a loop uses it."""
        try:
            fd = os.dup(self._sock.fileno())
        except OSError as error:
            raise self._broken(error) from error
        try:
            yield fd
        finally:
            os.close(fd)

    # --- bytes ---

    def _send_all(self, parts: Sequence[Buffer]) -> None:
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        limit = time.monotonic() + self.timeout_s
        at = 0
        while at < len(views):
            try:
                sent = self._sock.sendmsg(views[at : at + _IOV_MAX])
            except BlockingIOError:
                self._check(limit, "took no more bytes")
                continue
            except OSError as error:
                raise self._broken(error) from error
            limit = time.monotonic() + self.timeout_s
            if limit > self.deadline:
                self._check(limit, "is too slow")
            at = _advance(views, at, sent)

    def _read_all(self, parts: Sequence[Buffer], idle_s: float | None = 0.0) -> None:
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        begin = time.monotonic()
        limit = float("inf") if idle_s is None else begin + (idle_s or self.timeout_s)
        at = 0
        while at < len(views):
            try:
                if len(views) - at == 1:
                    received = self._sock.recv_into(views[at], 0, socket.MSG_WAITALL)
                else:
                    received = self._sock.recvmsg_into(views[at : at + _IOV_MAX], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                self._check(limit, "sent nothing more")
                continue
            except OSError as error:
                raise self._broken(error) from error
            if received == 0:
                raise SyncError("the peer closed the connection", phase="wait", peer=self.peer)
            limit = time.monotonic() + self.timeout_s
            if limit > self.deadline:
                self._check(limit, "is too slow")
            at = _advance(views, at, received)

    def _check(self, limit: float, what: str) -> None:
        now = time.monotonic()
        if now >= limit:
            raise SyncError(f"the peer {what} for {self.timeout_s:g} s", phase="wait", peer=self.peer)
        if now >= self.deadline:
            raise SyncError(f"the peer {what}: the sync's own limit is over", phase="wait", peer=self.peer)

    def _broken(self, error: OSError) -> SyncError:
        return SyncError(f"the connection broke: {error.strerror or error}", phase="wait", peer=self.peer)


def _advance(views: list[memoryview], at: int, count: int) -> int:
    while at < len(views) and count >= len(views[at]):
        count -= len(views[at])
        at += 1
    if count:
        views[at] = views[at][count:]
    return at


def _pack(frame: Frame) -> bytes:
    fields = (frame.kind, frame.flags, 0, frame.sync, frame.size, frame.index, frame.value, len(frame.meta), 0)
    head = bytearray(_FRAME.pack(b"VFLF", *fields, frame.checksum, 0))
    head[56:64] = _header_check(head, frame.meta).to_bytes(8, "little")
    return bytes(head) + frame.meta


def _header_check(header: Buffer, meta: Buffer) -> int:
    checksum = xxhash.xxh3_64(memoryview(header)[:56])
    checksum.update(meta)
    return checksum.intdigest()


# --- the handshake: fixed sizes, and nothing is parsed before both ends have proved the secret ---


def dial(address: str, hello: Hello, secret: bytes, timeout_s: float) -> tuple[Link, bytes]:
    """Connect to ``tcp://host:port`` or ``unix:name`` and prove the secret; the link and the receiver's id.

    Raises:
        SyncError: nobody answers within the limit.
        Refused: the other end is another version, or has another secret.
    """
    limit = time.monotonic() + timeout_s
    sock = _connect(address, timeout_s)
    try:
        mine = _HELLO.pack(
            b"VFLW", PROTOCOL, hello.kind, 0, hello.session, hello.rank, hello.lane, 0, secrets.token_bytes(32)
        )
        sock.sendall(mine)
        theirs = _take(sock, _ANSWER.size, limit, address)
        magic, version, status, _, receiver, _ = _ANSWER.unpack(theirs)
        if magic != b"VFLW":
            raise Refused("what listens there is no verl-fl receiver", phase="handshake", peer=address)
        if version != PROTOCOL:
            raise Refused(
                f"the receiver speaks version {version} of the wire format, this end {PROTOCOL}",
                phase="handshake",
                peer=address,
                fix="install the same verl-fl on both ends",
            )
        if not hmac.compare_digest(_take(sock, _PROOF_BYTES, limit, address), _proof(secret, b"listen", mine, theirs)):
            raise _other_secret(address)
        sock.sendall(_proof(secret, b"dial", mine, theirs))
        if _take(sock, 1, limit, address) != b"\x01":
            raise BadFrame("the handshake did not end as it should", phase="handshake", peer=address)
        return Link(sock, address, timeout_s), receiver
    except OSError as error:
        sock.close()
        raise SyncError(f"the handshake broke: {error.strerror or error}", phase="handshake", peer=address) from error
    except BaseException:
        sock.close()
        raise


def answer(sock: socket.socket, receiver: bytes, secret: bytes, peer: str, timeout_s: float) -> Link:
    """The listening end of :func:`dial`.

    Raises:
        Refused: the other end is another version, or has another secret.
        SyncError: it says nothing in time.
    """
    limit = time.monotonic() + timeout_s
    sock.settimeout(timeout_s)
    theirs = _take(sock, _HELLO.size, limit, peer)
    magic, version, kind, _, session, rank, lane, _, _ = _HELLO.unpack(theirs)
    if magic != b"VFLW":
        raise Refused("a stranger connected", phase="handshake", peer=peer)
    mine = _ANSWER.pack(b"VFLW", PROTOCOL, 0, 0, receiver, secrets.token_bytes(32))
    sock.sendall(mine + _proof(secret, b"listen", theirs, mine))
    if version != PROTOCOL:
        raise Refused(
            f"the sender speaks version {version} of the wire format, this end {PROTOCOL}",
            phase="handshake",
            peer=peer,
            fix="install the same verl-fl on both ends",
        )
    if not hmac.compare_digest(_take(sock, _PROOF_BYTES, limit, peer), _proof(secret, b"dial", theirs, mine)):
        raise _other_secret(peer)
    sock.sendall(b"\x01")
    link = Link(sock, peer, timeout_s)
    link.hello = Hello(kind, session, rank, lane)
    return link


def _other_secret(peer: str) -> Refused:
    return Refused(
        "the two ends hold different secrets",
        phase="handshake",
        peer=peer,
        fix="give both the same secret; two jobs on one host have one each",
    )


def _proof(secret: bytes, role: bytes, hello: bytes, answered: bytes) -> bytes:
    return hmac.digest(secret, b"verl-fl weight sync " + role + hello + answered, "sha256")


def _take(sock: socket.socket, size: int, limit: float, peer: str) -> bytes:
    data = b""
    while len(data) < size:
        left = limit - time.monotonic()
        if left <= 0:
            raise SyncError("no answer to the handshake in time", phase="handshake", peer=peer)
        sock.settimeout(left)
        try:
            part = sock.recv(size - len(data))
        except TimeoutError:
            continue
        if not part:
            raise SyncError("the peer closed the connection in the handshake", phase="handshake", peer=peer)
        data += part
    return data


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``; an IPv6 host stands in brackets.

    Raises:
        ValueError: it is no such address.
    """
    text = address.removeprefix("tcp://")
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or (":" in host and not text.startswith("[")):
        raise ValueError(
            f"{address!r} is no address of a receiver\n  legal: tcp://host:port, tcp://[2001:db8::1]:port"
            "\n  do: pass what `receiver.address` says"
        )
    return host, int(port)


def _connect(address: str, timeout_s: float) -> socket.socket:
    try:
        if address.startswith("unix:"):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(timeout_s)
            sock.connect("\0" + address.removeprefix("unix:"))
            return sock
        return socket.create_connection(parse_address(address), timeout_s)
    except TimeoutError as error:
        fix = "a firewall may drop the packets: open the port, or the range of fl.weight_sync.ports"
        here = socket.gethostname()
        raise SyncError(
            f"{here} got no answer from {address} in {timeout_s:g} s", phase="dial", peer=address, fix=fix
        ) from error
    except OSError as error:
        raise SyncError(
            f"can't connect: {error.strerror or error}",
            phase="dial",
            peer=address,
            fix="is the receiver alive, and the address one of its own?",
        ) from error


def host_id() -> str:
    """The same for two processes exactly where a unix socket of one is seen by the other: kernel and namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"
