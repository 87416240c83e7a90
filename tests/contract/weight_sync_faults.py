"""Faults for weight sync: a model whose bytes are a function of its version, a proxy that breaks connections, processes
that die, and a rig that says of every end whether what it claims of its weights is true."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import faulthandler
import gc
import multiprocessing
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from verl_fl.weight_sync import Receiver, Sender, SyncError
from verl_fl.weight_sync.outlets import Below

SECRET = b"a secret of these tests"
SENTINEL = 1 << 20
"""The version that a receiver holds before its first sync."""
BUCKET_BYTES = 4096

# --- a model whose bytes are a function of its version ---

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHAPES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "embed": (torch.bfloat16, (211, 48)),  # many buckets, and its last element ends inside one
    "empty": (torch.float32, (0, 7)),
    "scale": (torch.float32, ()),
    "mask": (torch.bool, (77,)),
    "steps": (torch.int64, (65,)),
    "strided": (torch.float32, (61, 33)),
    "half": (torch.float16, (2048,)),  # exactly one bucket
    "codes": (torch.uint8, (5001,)),
    "small": (torch.bfloat16, (3,)),
    "last": (torch.float32, (1100,)),
}
TIED = ("head", "embed")


def model(version: int) -> dict[str, torch.Tensor]:
    """Every few elements one differs between any two versions; most don't change from one version to the next."""
    found: dict[str, torch.Tensor] = {}
    for k, (name, (dtype, shape)) in enumerate(_SHAPES.items()):
        random_bits = torch.Generator().manual_seed(k)
        numel = torch.Size(shape).numel()
        if dtype == torch.bool:
            bits = torch.randint(0, 2, (numel,), generator=random_bits, dtype=torch.uint8)
            bits[version % 5 :: 5] ^= 1
            tensor = bits.bool()
        else:
            itemsize = dtype.itemsize
            info = torch.iinfo(_BITS[itemsize])
            bits = torch.randint(info.min, info.max, (numel,), generator=random_bits, dtype=_BITS[itemsize])
            bits[version % 5 :: 5] ^= version * 2654435761 % (info.max - 1) + 1
            tensor = bits.view(dtype)
        tensor = tensor.reshape(shape)
        if name == "strided":
            tensor = tensor.t().contiguous().t()
        found[name] = tensor
    found[TIED[0]] = found[TIED[1]]
    return found


def differing(held: dict[str, torch.Tensor], version: int) -> list[str]:
    """Names of the tensors that are not, bit for bit, those of ``version``."""
    wanted = model(version)
    return [name for name in wanted if name not in held or not same_bits(held[name], wanted[name])]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of one dtype, shape and content, NaNs and signed zeros included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    kind = _BITS[one.dtype.itemsize]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def items(version: int, *, raise_at: int = -1, slow: Callable[[int], None] | None = None) -> Iterator:
    """The model as a generator, which raises instead of yielding tensor ``raise_at``."""
    for k, pair in enumerate(model(version).items()):
        if k == raise_at:
            raise ValueError(f"no tensor {k} today")
        if slow is not None:
            slow(k)
        yield pair


# --- a proxy that breaks connections ---

FAULTS = ("stall", "cut", "flip", "reset", "duplicate", "drop")


@dataclasses.dataclass(slots=True)
class Fault:
    """What happens to the bytes that go one way through a proxy, once."""

    kind: str
    at: int
    """Counted over all connections that way, in bytes."""
    up: bool = True
    """From the dialing to the listening end."""
    fired: bool = False
    seen: int = 0


class Proxy:
    """Stands before a receiver's tcp and unix addresses; file descriptors pass too."""

    def __init__(self, address: str, unix: str = "") -> None:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        self._far = {"tcp": (host, int(port)), "unix": "\0" + unix}
        self.fault: Fault | None = None
        self._lock = threading.Lock()
        self._socks: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False
        tcp = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{tcp.getsockname()[1]}"
        self._listening = {"tcp": tcp}
        self.unix = ""
        if unix:
            self.unix = f"faults-{os.getpid()}-{random.getrandbits(64):x}"
            listening = socket.socket(socket.AF_UNIX)
            listening.bind("\0" + self.unix)
            listening.listen()
            self._listening["unix"] = listening
        for kind in self._listening:
            self._start(self._accept, kind)

    def close(self) -> None:
        """Close everything and wait for the threads."""
        self._closing = True
        for listening in self._listening.values():
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()
        with self._lock:
            socks = list(self._socks)
        for sock in socks:
            _shut(sock)
        for thread in self._threads:
            thread.join(5)
        assert not any(thread.is_alive() for thread in self._threads), "the proxy itself hangs"

    def _start(self, work: Callable, *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, name="proxy", daemon=True)
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [thread]
        thread.start()

    def _accept(self, kind: str) -> None:
        while True:
            try:
                near, _ = self._listening[kind].accept()
            except OSError:
                return
            far = socket.socket(socket.AF_INET if kind == "tcp" else socket.AF_UNIX)
            try:
                far.connect(self._far[kind])
            except OSError:
                near.close()
                far.close()
                continue
            with self._lock:
                self._socks |= {near, far}
            pair = [near, far]
            done: list[int] = []
            self._start(self._pump, near, far, True, pair, done)
            self._start(self._pump, far, near, False, pair, done)

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool, pair: list, done: list) -> None:
        try:
            while True:
                data, fds = _take(source)
                if not data:
                    break
                *parts, last = self._broken(data, up, pair)
                for part in parts:
                    sink.sendall(part)
                _give(sink, last, fds)
        except OSError:
            pass
        finally:
            for sock in pair:
                _shut(sock)
            with self._lock:
                done.append(1)
                last = len(done) == 2
                if last:
                    self._socks -= set(pair)
            if last:
                for sock in pair:
                    sock.close()

    def _broken(self, data: bytes, up: bool, pair: list) -> list[bytes]:
        fault = self.fault
        if fault is None or fault.up != up:
            return [data]
        with self._lock:
            begin, fault.seen = fault.seen, fault.seen + len(data)
            if fault.fired or not begin <= fault.at < begin + len(data):
                return [data]
            fault.fired = True
        at = fault.at - begin
        if fault.kind == "stall":
            _give(pair[up], data[:at], [])
            for sock in pair:  # until one of the ends gives up
                with contextlib.suppress(OSError):
                    sock.settimeout(None)
            while not self._closing and not _hung_up(pair):
                time.sleep(0.02)
            raise OSError("stalled")
        if fault.kind == "cut":
            _give(pair[up], data[:at], [])
            raise OSError("cut")
        if fault.kind == "reset":
            for sock in pair:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                with contextlib.suppress(OSError):
                    os.close(sock.detach())
            raise OSError("reset")
        if fault.kind == "flip":
            return [data[:at] + bytes([data[at] ^ 1 << fault.at % 8]) + data[at + 1 :]]
        length = 1 + fault.at % 97
        block = data[at : at + length]
        return (
            [data[: at + length], block, data[at + length :]]
            if fault.kind == "duplicate"
            else [
                data[:at],
                data[at + length :],
            ]
        )


def _take(sock: socket.socket) -> tuple[bytes, list[int]]:
    if sock.family != socket.AF_UNIX:
        return sock.recv(65536), []
    data, ancillary, _, _ = sock.recvmsg(65536, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for _, _, found in ancillary:
        fds.frombytes(found)
    return data, list(fds)


def _give(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    sock.sendall(data[:-1] if fds else data)
    if fds:  # they came with the last byte: what follows them is never read in one go with them
        try:
            sock.sendmsg([data[-1:]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        finally:
            for fd in fds:
                os.close(fd)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _hung_up(pair: list[socket.socket]) -> bool:
    import select

    poll = select.poll()
    for sock in pair:
        if sock.fileno() < 0:
            return True
        poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


# --- ends that run beside the test ---


class Placed(Receiver):
    """A receiver that claims a host and a unix socket, as one behind a proxy or on another node would."""

    claims: tuple[str, str] | None = None

    @property
    def below(self) -> Below:
        seen = super().below
        return seen if self.claims is None else Below(seen.address, self.claims[0] or seen.host, self.claims[1])


@dataclasses.dataclass(slots=True)
class Result:
    """How one call ended; neither: it did not."""

    value: Any = None
    error: BaseException | None = None
    seconds: float = -1.0

    @property
    def ok(self) -> bool:
        assert self.seconds >= 0
        return self.error is None


class Together:
    """Calls that run at once, each of which must end in time."""

    def __init__(self) -> None:
        self._calls: list[tuple[threading.Thread, Result]] = []

    def call(self, work: Callable, *args: Any, **kwargs: Any) -> Result:
        """Start ``work``; the result fills later."""
        result = Result()

        def run() -> None:
            begin = time.monotonic()
            try:
                result.value = work(*args, **kwargs)
            except BaseException as error:
                result.error = error
            result.seconds = time.monotonic() - begin

        thread = threading.Thread(target=run, name="end", daemon=True)
        thread.start()
        self._calls.append((thread, result))
        return result

    def wait_for(self, result: Result, within_s: float) -> None:
        """One of the calls has ended."""
        limit = time.monotonic() + within_s
        while result.seconds < 0:
            assert time.monotonic() < limit, f"a call had not ended after {within_s} s"
            time.sleep(0.005)

    def wait(self, within_s: float) -> None:
        """All calls have ended; else the test fails, and says where every thread hangs."""
        limit = time.monotonic() + within_s
        for thread, _ in self._calls:
            thread.join(max(limit - time.monotonic(), 0))
        if any(thread.is_alive() for thread, _ in self._calls):
            faulthandler.dump_traceback(file=sys.__stderr__)
            raise AssertionError(f"an end had not ended after {within_s} s; the stacks are on stderr")


def held(receiver: Receiver, tensors: dict[str, torch.Tensor], before: tuple[str, int, int], result: Result) -> str:
    """What is wrong with a receiver after a sync, ``""`` if nothing.

    Args:
        before: its state, version, and the version that its tensors had before the sync.
    """
    state, version, version_held = before
    if result.ok:
        if receiver.state != "whole" or receiver.version != result.value.version:
            return f"receive() returned and the state is {receiver.state!r}, version {receiver.version}"
        wrong = differing(tensors, receiver.version)
        return f"says whole and has other bytes in {wrong}" if wrong else ""
    if not isinstance(result.error, SyncError):
        return f"an error that is no SyncError: {result.error!r}"
    if receiver.state.startswith("incomplete: "):
        if receiver.keep_old:
            return f"was to keep the old weights and says {receiver.state}"
        return "" if receiver.base == 0 else "incomplete, and still offers a base for deltas"
    if (receiver.state, receiver.version) != (state, version):
        return f"failed and went from {state!r}, {version} to {receiver.state!r}, {receiver.version}"
    if state.startswith("incomplete"):
        return ""
    wrong = differing(tensors, version_held)
    return f"failed, says {receiver.state!r} as before, and {wrong} changed" if wrong else ""


class Rig:
    """A sender (of any number of ranks), receivers, and a proxy before each, all in this process.

    Args:
        below: ``apart``: each receiver claims a host of its own, so that they pass the weights on.
        drawn: receivers hand the weights to a consumer instead of writing them to targets.
    """

    def __init__(
        self,
        *,
        receivers: int = 1,
        ranks: int = 1,
        transport: str = "tcp",
        topology: str = "auto",
        delta: bool = False,
        keep_old: bool = False,
        drawn: bool = False,
        apart: bool = False,
        timeout_s: float = 1.0,
        sync_limit_s: float = 5.0,
        secret: bytes = SECRET,
    ) -> None:
        self.timeout_s, self.limit_s, self._drawn = timeout_s, sync_limit_s + 3, drawn
        self.targets = [{} if drawn else owned(SENTINEL) for _ in range(receivers)]
        self.receivers, self.proxies = [], []
        for k, targets in enumerate(self.targets):
            receiver = Placed(
                None if drawn else targets,
                secret=secret,
                host="127.0.0.1",
                timeout_s=timeout_s,
                sync_limit_s=sync_limit_s,
                keep_old=keep_old,
                delta=delta,
            )
            proxy = Proxy(receiver.address, receiver.below.unix)
            receiver.claims = (f"host {k}", "") if apart else ("", proxy.unix)
            self.receivers.append(receiver)
            self.proxies.append(proxy)
        self.held = [SENTINEL] * receivers
        self.senders = [
            Sender(
                [proxy.address for proxy in self.proxies],
                secret=secret,
                rank=rank,
                num_ranks=ranks,
                transport=transport,
                topology=topology,
                delta=delta,
                bucket_bytes=BUCKET_BYTES,
                timeout_s=timeout_s,
                sync_limit_s=sync_limit_s,
            )
            for rank in range(ranks)
        ]

    def sync(self, version: int, weights: Callable[[], Any] | None = None, meanwhile: Callable | None = None) -> Ends:
        """One sync; every end ends in time, and is what it says."""
        together = Together()
        before = [(r.state, r.version, held) for r, held in zip(self.receivers, self.held, strict=True)]
        work = [together.call(self._receive, k) for k in range(len(self.receivers))]
        sent = [together.call(s.send, weights() if weights else model(version), version) for s in self.senders]
        if meanwhile is not None:
            together.call(meanwhile)
        together.wait(self.limit_s)
        for k, result in enumerate(work):
            problem = held(self.receivers[k], self.targets[k], before[k], result)
            assert not problem, f"receiver {k} {problem}; it ended with {result.error!r}; senders: {sent}"
            if result.ok:
                assert result.value.version == version
                self.held[k] = version
        for result in sent:
            assert result.ok or isinstance(result.error, SyncError | ValueError), f"{result.error!r} is no SyncError"
            if result.ok:
                assert all(r.ok for r in work), f"the sender says all is well, and the receivers: {work}"
        return Ends(work, sent)

    def well(self, version: int) -> Ends:
        """A sync over clean paths, which must succeed."""
        for proxy in self.proxies:
            proxy.fault = None
        ends = self.sync(version)
        assert ends.ok, f"a sync over a clean path failed: {ends}"
        return ends

    def _receive(self, k: int) -> Any:
        receiver = self.receivers[k]
        if not self._drawn:
            return receiver.receive(self.timeout_s)
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in receiver.stream(self.timeout_s):
            whole[name] = tensor.clone()
            if tensor.numel():  # a consumer that has drawn anything no longer has the old weights
                self.targets[k][name] = whole[name]
        self.targets[k].clear()
        self.targets[k].update(whole)
        return receiver.report

    def close(self) -> None:
        """Close every end."""
        for end in (*self.senders, *self.receivers, *self.proxies):
            end.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass(slots=True)
class Ends:
    """How a sync ended for each."""

    received: list[Result]
    sent: list[Result]

    @property
    def ok(self) -> bool:
        return all(result.ok for result in (*self.received, *self.sent))


def owned(version: int) -> dict[str, torch.Tensor]:
    """A model to write into."""
    made = {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in model(version).items()}
    made[TIED[0]] = made[TIED[1]]
    return made


# --- what must not leak ---


def resources() -> dict[str, int]:
    """What this process holds of each kind."""
    kinds: dict[str, int] = {"threads": threading.active_count()}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            place = os.readlink(f"/proc/self/fd/{name}")
            kind = "memfd" if "memfd" in place else place.partition(":")[0] if ":" in place else "file"
            kinds[kind] = kinds.get(kind, 0) + 1
    with open("/proc/self/maps") as maps:
        kinds["mapped memfd"] = sum("memfd:verl-fl" in line for line in maps)
    return kinds


@contextlib.contextmanager
def nothing_left(within_s: float = 3.0) -> Iterator[None]:
    """Fail where more of a kind is held afterwards than before, once what is ending has had its time to end."""
    before = resources()
    yield
    limit = time.monotonic() + within_s
    while more := {k: n - before.get(k, 0) for k, n in resources().items() if n > before.get(k, 0)}:
        gc.collect()  # errors and their tracebacks are cycles
        if time.monotonic() > limit:
            names = sorted(thread.name for thread in threading.enumerate())
            raise AssertionError(f"left behind: {more}; threads: {names}")
        time.sleep(0.02)


def rss_mib() -> float:
    """Memory of this process that is in use now."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


# --- ends in processes of their own ---

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "verl_fl.weight_sync.sender", "verl_fl.weight_sync.receiver", __name__])


@contextlib.contextmanager
def children() -> Iterator[None]:
    """Around all that starts a :class:`Child`; its processes start fast, from one that has torch loaded."""
    from multiprocessing import forkserver

    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


class Child:
    """A sender or receiver in its own process, which can be stopped or killed at any moment.

    Args:
        kind: ``sender`` or ``receiver``.
        options: of :class:`Sender` or :class:`Receiver`; ``claims`` of :class:`Placed`.
    """

    def __init__(self, kind: str, **options: Any) -> None:
        self._pipe, theirs = _context.Pipe()
        self._asked = 1
        self.process = _context.Process(target=_child, args=(theirs, kind, options), daemon=True)
        self.process.start()
        theirs.close()
        self.address = self.answer(30.0)

    def ask(self, *what: Any) -> None:
        """Let it begin; not where it is dead."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(what)
            self._asked += what[0] != "addresses"

    def has_answered(self) -> bool:
        """Whether an answer is there now."""
        return self._pipe.poll(0)

    def idle(self) -> bool:
        """Whether it has answered all that was asked."""
        return self._asked == 0

    def answer(self, within_s: float) -> Any:
        """What came of it; None: the process has died."""
        assert self._pipe.poll(within_s), f"a process had not ended its sync after {within_s} s"
        try:
            self._asked -= 1
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return None

    def signal(self, number: int) -> None:
        """To this process only."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.join(10)
        self._pipe.close()
        self.process.close()


def _child(pipe: Connection, kind: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if kind == "sender":
        sender = Sender(**options)
        pipe.send("")
        while True:
            version, *addresses = pipe.recv()
            if addresses:
                sender.addresses = addresses[0]
                continue
            pipe.send(_outcome(lambda v=version: sender.send(model(v), v)))
    claims = options.pop("claims", None)
    targets = owned(SENTINEL)
    receiver = Placed(targets, **options)
    receiver.claims = claims
    pipe.send(receiver.address)
    holds = SENTINEL
    while True:
        (wait_s,) = pipe.recv()
        before = (receiver.state, receiver.version, holds)
        result = Result()
        begin = time.monotonic()
        try:
            result.value = receiver.receive(wait_s)
            holds = receiver.version
        except BaseException as error:
            result.error = error
        result.seconds = time.monotonic() - begin
        pipe.send((result.ok, str(result.error), held(receiver, targets, before, result), receiver.version, ""))


def _outcome(work: Callable[[], Any]) -> tuple[bool, str, str, int, str]:
    try:
        report = work()
        return True, "", "", report.version, report.mode
    except SyncError as error:
        return False, str(error), "", -1, ""
    except BaseException as error:
        return False, str(error), f"an error that is no SyncError: {error!r}", -1, ""
