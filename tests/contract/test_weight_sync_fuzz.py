"""Weight sync and bytes that make no sense, from strangers and from ends that hold the secret."""

from __future__ import annotations

import contextlib
import json
import queue
import random
import secrets
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from weight_sync_faults import SECRET, SENTINEL, Rig, Together, differing, model, nothing_left, owned

from verl_fl.weight_sync import Receiver, Sender, SyncError, link, manifest
from verl_fl.weight_sync._errors import BadFrame, Refused
from verl_fl.weight_sync.link import BEGIN, CONTROL, DATA, END, ERROR, MANIFEST, PLAN, RING, STATE, Hello, Link
from verl_fl.weight_sync.listener import Listener

SEED = 20_260


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield


# --- the manifest ---


def _packed() -> bytes:
    entries = [manifest.Entry(name, t.dtype, tuple(t.shape)) for name, t in model(1).items() if name != "head"]
    return manifest.pack([*entries, manifest.Entry("head", torch.bfloat16, (211, 48), 0)])


def _damaged(data: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(5)
    at = rng.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 2:
        return rng.randbytes(rng.randrange(200))
    if kind == 3:
        return data[:at] + rng.choice([b"\xff", b"\0"]) * 8 + data[at + 8 :]
    return data[:at] + data[at + rng.randrange(1, 9) :]


def test_a_manifest_of_any_bytes_is_entries_or_a_bad_frame():
    rng, whole, good = random.Random(SEED), _packed(), 0
    assert manifest.pack(manifest.unpack(whole)) == whole
    tracemalloc.start()
    for _ in range(5000):
        data = _damaged(whole, rng)
        try:
            entries = manifest.unpack(data)
        except BadFrame:
            continue
        good += 1
        for entry in entries:
            assert 0 <= entry.num_bytes <= manifest.MAX_TENSOR_BYTES and entry.name
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 100 < good < 4000  # cut between entries, or a bit of a name
    assert peak < 1 << 20, f"{peak} bytes were allocated for a manifest of {len(whole)}"


@pytest.mark.parametrize(
    "name, dtype, shape, message",
    [
        (b"a", b"float32", (1 << 63, 0), "over 64 TiB"),
        (b"a", b"float32", (1 << 23, 1 << 23), "over 64 TiB"),
        (b"a", b"nn", (1,), "unknown to torch"),
        (b"a", b"onnx", (1,), "unknown to torch"),
        (b"a", b"float33", (1,), "unknown to torch"),
        (b"\xff", b"float32", (1,), "not text"),
        (b"", b"float32", (1,), "name of 0 bytes"),
        (b"a" * 5000, b"float32", (1,), "name of 5000 bytes"),
        (b"a", b"float32", (1,) * 40, "40 dims"),
    ],
)
def test_an_absurd_entry_is_a_bad_frame_that_says_what(name, dtype, shape, message):
    head = struct.pack("<HBBI", len(name), len(dtype), len(shape), 0xFFFFFFFF)
    with pytest.raises(BadFrame, match=message):
        manifest.unpack(head + name + dtype + struct.pack(f"<{len(shape)}Q", *shape))


# --- frames ---


@contextlib.contextmanager
def _linked(timeout_s: float = 0.2) -> Iterator[tuple[socket.socket, Link]]:
    near, far = socket.socketpair()
    made = Link(far, "the other end", timeout_s)
    try:
        yield near, made
    finally:
        near.close()
        made.close()


def test_a_frame_of_any_bytes_is_read_or_a_sync_error():
    rng = random.Random(SEED)
    whole = link._pack(link.Frame(BEGIN, 7, meta=json.dumps({"ranks": 1, "version": 2}).encode()))
    tracemalloc.start()
    for _ in range(300):
        data = _damaged(whole, rng)
        with _linked() as (near, made):
            near.sendall(data)
            near.shutdown(socket.SHUT_WR)
            try:
                frame = made.receive()
            except SyncError:
                continue
            assert data.startswith(whole) and frame.meta == whole[64:]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < link.MAX_META_BYTES + (1 << 20)


def test_a_frame_that_claims_more_than_is_allowed_costs_nothing():
    head = struct.pack("<4sBBHQQQQIIQQ", b"VFLF", BEGIN, 0, 0, 1, 0, 0, 0, link.MAX_META_BYTES + 1, 0, 0, 0)
    tracemalloc.start()
    with _linked() as (near, made):
        near.sendall(head)
        with pytest.raises(BadFrame, match="claims"):
            made.receive()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_frame_that_ends_in_the_middle_is_waited_for_only_so_long():
    whole = link._pack(link.Frame(BEGIN, 7, meta=b"{}"))
    for size in (1, 63, 64, 65):
        with _linked(0.1) as (near, made):
            near.sendall(whole[:size])
            begin = time.monotonic()
            with pytest.raises(SyncError, match="sent nothing more for 0.1 s"):
                made.receive(idle_s=None)
            assert time.monotonic() - begin < 1.5


@pytest.mark.parametrize("meta", [b"", b"[1]", b"7", b"\xff\xfe", b'{"a":', b"[" * 100_000, b"1" * 10_000, b"null"])
def test_a_control_frame_that_is_no_object_is_a_bad_frame(meta):
    with pytest.raises(BadFrame):
        link.Frame(BEGIN, 1, meta=meta).json()


# --- the handshake ---


def _answered(data: bytes, *, hang_up: bool) -> Exception | Link:
    near, far = socket.socketpair()
    together = Together()
    got = together.call(link.answer, far, b"r" * 16, SECRET, "a stranger", 0.2)
    near.sendall(data)
    if hang_up:
        near.shutdown(socket.SHUT_WR)
    together.wait(2)
    near.close()
    far.close()
    return got.error or got.value


def test_a_handshake_of_any_bytes_is_refused_in_time():
    rng = random.Random(SEED)
    hello = link._HELLO.pack(b"VFLW", link.PROTOCOL, CONTROL, 0, b"s" * 16, 0, 0, 0, b"n" * 32)
    for k in range(200):
        data = rng.choice(
            [rng.randbytes(rng.randrange(300)), _damaged(hello, rng), hello + rng.randbytes(32), b"GET /"]
        )
        error = _answered(data, hang_up=k % 8 > 0)
        assert isinstance(error, SyncError), f"{data!r} led to {error!r}"


def test_a_listener_of_any_bytes_is_refused_in_time():
    rng = random.Random(SEED)
    for k in range(100):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
            together = Together()
            got = together.call(link.dial, address, Hello(CONTROL, b"s" * 16), SECRET, 0.2)
            sock, _ = server.accept()
            answer = link._ANSWER.pack(b"VFLW", link.PROTOCOL, 0, 0, b"r" * 16, b"n" * 32)
            with contextlib.suppress(OSError):
                sock.sendall(rng.choice([answer + rng.randbytes(40), _damaged(answer, rng), rng.randbytes(150), b""]))
            if k % 8:
                sock.close()
            together.wait(2)
            sock.close()
            assert isinstance(got.error, SyncError), got


def test_each_end_names_the_version_of_the_wire_format_that_the_other_speaks(monkeypatch):
    mine, theirs = link.PROTOCOL, link.PROTOCOL + 1
    near, far = socket.socketpair()
    together = Together()
    got = together.call(link.answer, far, b"r" * 16, SECRET, "a newer end", 0.5)
    near.sendall(link._HELLO.pack(b"VFLW", theirs, CONTROL, 0, b"s" * 16, 0, 0, 0, b"n" * 32))
    together.wait(2)
    assert (
        isinstance(got.error, Refused)
        and f"version {theirs}" in str(got.error)
        and f"this end {mine}" in str(got.error)
    )
    near.close()
    far.close()
    with Receiver({}, secret=SECRET, host="127.0.0.1", timeout_s=1.0) as receiver:
        answer = link._ANSWER

        class Newer:
            size = answer.size
            unpack = answer.unpack

            @staticmethod
            def pack(magic: bytes, _: int, *rest: Any) -> bytes:
                return answer.pack(magic, theirs, *rest)

        monkeypatch.setattr(link, "_ANSWER", Newer)
        with Sender([receiver.address], secret=SECRET, timeout_s=1.0) as sender:
            with pytest.raises(Refused, match=f"speaks version {theirs} of the wire format, this end {mine}") as caught:
                sender.send({"a": torch.ones(1)})
            assert "same verl-fl" in caught.value.fix


# --- ends that hold the secret, and talk nonsense ---

WRONG = [None, True, -1, 1 << 70, 1.5, float("nan"), "x", [], [1], {}, {"a": 1}, [[[]]]]


class _Talker:
    """A sender by hand."""

    def __init__(self, address: str, kind: int = CONTROL, session: bytes = b"t" * 16, rank: int = 0) -> None:
        self.link, _ = link.dial(address, Hello(kind, session, rank), SECRET, 1.0)

    def until(self, kind: int) -> link.Frame:
        while True:
            frame = self.link.receive(idle_s=2.0)
            if frame.kind == kind:
                return frame
            if frame.kind == ERROR:
                raise SyncError(str(frame.json()["error"]), phase="said")


def _nonsense(rng: random.Random, good: dict[str, Any]) -> dict[str, Any]:
    found = dict(good)
    for name in rng.sample(sorted(found), rng.randrange(1, 3)):
        if rng.random() < 0.2:
            del found[name]
        else:
            found[name] = rng.choice(WRONG)
    return found


def test_a_receiver_answers_nonsense_with_an_error_and_takes_the_next_sync():
    rng = random.Random(SEED)
    targets, failures = owned(SENTINEL), 0
    below = {"address": "tcp://127.0.0.1:1", "host": "h", "unix": "", "transport": "tcp"}
    good_begin = {"ranks": 1, "version": 1, "base": 0, "sync": 5}
    good_plan = {"bucket_bytes": 4096, "mode": "full", "below": []}
    with Receiver(targets, secret=SECRET, host="127.0.0.1", timeout_s=0.3, sync_limit_s=3.0) as receiver:
        for k in range(80):
            together = Together()
            got = together.call(receiver.receive, 0.5)
            talker = _Talker(receiver.address, session=secrets.token_bytes(16))
            with contextlib.suppress(SyncError):
                begin = _nonsense(rng, good_begin) if k % 4 == 0 else good_begin
                talker.link.send(BEGIN, 5, begin)
                if k % 4 > 0:
                    talker.until(STATE)
                plan = _nonsense(rng, good_plan | {"below": [_nonsense(rng, below)]}) if k % 4 == 1 else good_plan
                talker.link.send(PLAN, 5, plan)
                kind = rng.choice([MANIFEST, END, PLAN, BEGIN, STATE, RING, 99, 0])
                if k % 4 == 2:
                    talker.link.send(kind, 5, rng.randbytes(rng.randrange(50)), flags=rng.randrange(2))
                entry = manifest.pack([manifest.Entry("small", torch.bfloat16, (3,))])
                talker.link.send(MANIFEST, 5, entry, flags=1)
                talker.link.send(END, 5, _nonsense(rng, {"tensors": 1, "bytes": 6, "buckets": 1}))
                talker.link.send(rng.choice([BEGIN, END, 77]), 5, b"{")
            together.wait(4)
            talker.link.close()
            assert isinstance(got.error, SyncError), f"{k}: {got}"
            failures += isinstance(got.error, BadFrame)
            assert not differing(targets, SENTINEL), k
        assert failures > 20
        with Sender([receiver.address], secret=SECRET) as sender:
            together = Together()
            got, sent = together.call(receiver.receive, 2.0), together.call(sender.send, model(3), 3)
            together.wait(5)
            assert got.ok and sent.ok and not differing(targets, 3)


def test_data_connections_that_bring_nonsense_end_the_sync_in_an_error():
    rng = random.Random(SEED)
    targets = {"w": torch.zeros(3000)}
    entries = manifest.pack([manifest.Entry("w", torch.float32, (3000,))])
    with Receiver(targets, secret=SECRET, host="127.0.0.1", timeout_s=0.5, sync_limit_s=3.0) as receiver:
        for k in range(60):
            together = Together()
            got = together.call(receiver.receive, 0.5)
            control = _Talker(receiver.address, session=secrets.token_bytes(16))
            control.link.send(BEGIN, 5, {"ranks": 1, "version": 1, "base": 0, "sync": 5})
            control.until(STATE)
            control.link.send(PLAN, 5, {"bucket_bytes": 4096, "mode": rng.choice(["full", "delta"]), "below": []})
            control.until(link.READY)
            control.link.send(MANIFEST, 5, entries, flags=1)
            data = _Talker(receiver.address, DATA)
            fields = {"index": 0, "value": 0, "flags": 0, "checksum": 0}
            name = rng.choice(
                ["index", "value", "flags", "checksum", "sync", "size", "garbage", "meta", "ring", "ring"]
            )
            if name in fields:
                fields[name] = rng.choice([1, 2, 3, 1 << 32, (1 << 32) + 64, (1 << 64) - 1]) & (
                    0xFF if name == "flags" else (1 << 64) - 1
                )
            size = rng.choice([0, 1, 4095, 4097, 1 << 62]) if name == "size" else 4096
            meta = rng.randbytes(rng.randrange(40)) if name == "meta" else b""
            with contextlib.suppress(SyncError):
                if name == "garbage":
                    data.link._send_all([rng.randbytes(100)])
                elif name == "ring":
                    data.link.send(RING, index=rng.choice([0, 4, 1 << 40]), value=rng.choice([0, 4096, 1 << 40]))
                    data.link._send_all([b"x"])
                else:
                    sync = 6 if name == "sync" else 5
                    frame = link.Frame(link.BUCKET, sync, size, meta=meta, **fields)
                    data.link.send_frame(frame, [bytes(min(size, 5000))])
            together.wait(4)
            for talker in (control, data):
                talker.link.close()
            assert isinstance(got.error, SyncError), f"{k} {name}: {got}"
        with Sender([receiver.address], secret=SECRET) as sender:
            together = Together()
            got, sent = together.call(receiver.receive, 2.0), together.call(sender.send, {"w": torch.ones(3000)}, 3)
            together.wait(5)
            assert got.ok and sent.ok and (targets["w"] == 1).all()


def test_a_sender_that_hears_nonsense_fails_in_time():
    rng = random.Random(SEED)
    state = {"address": "a", "host": "h", "unix": "", "base": 0, "dtypes": {"w": "float32"}, "speed": 0.0, "version": 0}
    plan = {"bucket_bytes": 1 << 20, "mode": "full", "root": True, "wants": [], "me": state}
    accepted: queue.Queue[socket.socket] = queue.Queue()
    listener = Listener("127.0.0.1", None, lambda sock, _: accepted.put(sock))
    bad = 0
    for k in range(80):
        rank = k % 2
        with Sender([listener.address], secret=SECRET, rank=rank, num_ranks=2, timeout_s=0.4) as sender:
            together = Together()
            sent = together.call(sender.send, {"w": torch.ones(3)})
            heard = link.answer(accepted.get(timeout=2), b"r" * 16, SECRET, "the sender", 1.0)
            sync = heard.receive(idle_s=1.0).sync
            kind = rng.choice([0, 77, END, MANIFEST, BEGIN]) if k % 5 == 0 else PLAN if rank else STATE
            body: Any = _nonsense(rng, plan if rank else state)
            if rank and rng.random() < 0.5:
                body = plan | {"me": _nonsense(rng, state), "wants": rng.choice(WRONG)}
            if not rank and rng.random() < 0.5:
                body = state | {"dtypes": rng.choice([{"w": w} for w in WRONG])}
            heard.send(kind, sync, rng.choice([b"", b"[]", b"{"]) if k % 7 == 0 else body)
            together.wait(4)
            heard.close()
            while not accepted.empty():
                accepted.get().close()
            assert isinstance(sent.error, SyncError), f"{kind} {body}: {sent}"
            bad += isinstance(sent.error, BadFrame)
    listener.close()
    while not accepted.empty():
        accepted.get().close()
    assert bad > 20


# --- strangers ---


def test_strangers_that_send_garbage_do_not_disturb_a_sync():
    rng = random.Random(SEED)
    with Rig(transport="tcp", receivers=2, timeout_s=3.0) as rig:
        stop = threading.Event()

        def disturb() -> int:
            strangers = 0
            while not stop.is_set():
                receiver = rng.choice(rig.receivers)
                host, port = link.parse_address(receiver.address)
                with socket.create_connection((host, port), 1) as sock, contextlib.suppress(OSError):
                    sock.sendall(rng.randbytes(rng.randrange(200)))
                    if strangers % 3 == 0:
                        sock.settimeout(0.02)
                        sock.recv(300)
                strangers += 1
            return strangers

        together = Together()
        count = together.call(disturb)
        for version in range(1, 11):
            rig.well(version)
        stop.set()
        together.wait(5)
        assert count.value > 10


def test_a_hundred_silent_strangers_keep_nobody_out():
    with Receiver(owned(SENTINEL), secret=SECRET, host="127.0.0.1", timeout_s=5.0) as receiver:
        place = link.parse_address(receiver.address)
        strangers = [socket.create_connection(place, 2) for _ in range(100)]
        with Sender([receiver.address], secret=SECRET, timeout_s=5.0) as sender:
            together = Together()
            got, sent = together.call(receiver.receive, 5.0), together.call(sender.send, model(1), 1)
            together.wait(10)
            assert got.ok and sent.ok, (got, sent)
            assert sent.seconds < 4, "it had to wait for the strangers' handshakes to end"
        for stranger in strangers:
            stranger.close()


def test_two_jobs_with_secrets_of_their_own_on_one_host_do_not_meet():
    with Rig(transport="shm") as ours, Rig(transport="shm", secret=b"another job's secret") as theirs:
        ours.well(1)
        theirs.well(2)
        stranger = Sender([ours.proxies[0].address], secret=b"another job's secret", timeout_s=1.0)
        with pytest.raises(Refused, match="different secrets") as caught:
            stranger.send(model(9), 9)
        assert "same secret" in caught.value.fix and caught.value.peer == ours.proxies[0].address
        ours.well(3)
        theirs.well(4)
