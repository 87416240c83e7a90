"""Weight sync under faults: every end ends in time, in an error or with the right bytes, and the next sync works."""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch
from weight_sync_faults import (
    BUCKET_BYTES,
    FAULTS,
    SECRET,
    SENTINEL,
    Child,
    Fault,
    Result,
    Rig,
    Together,
    children,
    differing,
    items,
    model,
    nothing_left,
    owned,
    rss_mib,
    same_bits,
)

from verl_fl.weight_sync import Receiver, Sender, SyncError, link, memory
from verl_fl.weight_sync.edge import Run, StreamEdge


@pytest.fixture(autouse=True, scope="module")
def _processes():
    with children():
        yield


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield


SETUPS: dict[str, dict[str, Any]] = {
    "tcp": {"transport": "tcp"},
    "unix": {"transport": "unix", "receivers": 2},
    "shm": {"transport": "shm", "receivers": 2},
    "chain": {"receivers": 3, "apart": True, "topology": "chain"},
    "tree of deltas": {"receivers": 3, "apart": True, "topology": "tree", "delta": True},
    "two ranks": {"ranks": 2, "transport": "shm", "receivers": 2, "delta": True},
    "keep old": {"delta": True, "keep_old": True, "transport": "unix"},
    "window": {"drawn": True},
    "drawn deltas": {"drawn": True, "delta": True, "transport": "shm"},
}


@pytest.mark.parametrize("setup", SETUPS)
def test_five_versions_in_a_row_arrive_bit_for_bit(setup):
    with Rig(**SETUPS[setup]) as rig:
        for version in range(1, 6):
            ends = rig.well(version)
            delta = "delta" in SETUPS[setup] and version > 1
            assert ends.sent[0].value.mode == ("delta" if delta else "full")


def _fault(seed: int, traffic: int) -> Fault:
    rng = random.Random(seed)
    up = rng.random() < 0.8
    # Half of them early, where the handshake and the plan are.
    most = 2000 if rng.random() < 0.4 or not up else traffic
    return Fault(rng.choice(FAULTS), rng.randrange(most), up)


def _break(setup: str, fault: Fault, which: int = 0, *, must_fire: bool = False) -> None:
    with Rig(**SETUPS[setup], timeout_s=0.8, sync_limit_s=3.0) as rig:
        rig.well(1)
        if fault.at % 2:  # with connections made anew, and with those of the last sync
            for sender in rig.senders:
                sender.close()
        rig.proxies[which % len(rig.proxies)].fault = fault
        ends = rig.sync(2)
        if must_fire:
            assert fault.fired and not any(result.ok for result in (*ends.received, *ends.sent)), ends
        assert fault.fired or ends.ok, f"it failed without a fault: {ends}"
        if fault.fired and ends.ok:  # the last bytes of a connection were hit, and the next sync meets the damage
            rig.proxies[which % len(rig.proxies)].fault = None
            rig.sync(3)
        rig.well(4)
        rig.well(5)


FIXED = [
    ("tcp", Fault("stall", 30_000)),
    ("tcp", Fault("flip", 20_001)),
    ("unix", Fault("drop", 25_000)),
    ("shm", Fault("cut", 900)),
    ("chain", Fault("reset", 15_001)),
    ("chain", Fault("duplicate", 22_000)),
    ("tree of deltas", Fault("flip", 3_000)),
    ("two ranks", Fault("cut", 301)),
    ("keep old", Fault("flip", 2_001)),
    ("window", Fault("cut", 33_333)),
    ("drawn deltas", Fault("reset", 99)),
    ("tcp", Fault("stall", 101, False)),
]


@pytest.mark.parametrize("setup, fault", FIXED, ids=lambda v: v if isinstance(v, str) else f"{v.kind}-{v.at}")
def test_a_broken_connection_fails_the_sync_at_every_end_and_the_next_works(setup, fault):
    _break(setup, Fault(fault.kind, fault.at, fault.up), must_fire=True)


# --- processes that die or are stopped ---


class _Job:
    """Ends in processes of their own; ``who`` is hurt, and afterwards killed and started anew."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._common = {"secret": SECRET, "timeout_s": 1.0, "sync_limit_s": 4.0}
        self._setup = setup
        self._delta = bool(setup.get("delta"))
        self.receivers = [self._receiver(k) for k in range(setup.get("receivers", 1))]
        self.senders = [self._sender(rank) for rank in range(setup.get("ranks", 1))]

    def _receiver(self, k: int) -> Child:
        claims = (f"host {k}", "") if self._setup.get("apart") else None
        keep_old = bool(self._setup.get("keep_old"))
        return Child("receiver", host="127.0.0.1", claims=claims, keep_old=keep_old, delta=self._delta, **self._common)

    def _sender(self, rank: int) -> Child:
        return Child(
            "sender",
            addresses=[receiver.address for receiver in self.receivers],
            rank=rank,
            num_ranks=self._setup.get("ranks", 1),
            transport=self._setup.get("transport", "auto"),
            topology=self._setup.get("topology", "auto"),
            delta=self._delta,
            bucket_bytes=BUCKET_BYTES,
            **self._common,
        )

    @property
    def ends(self) -> list[Child]:
        return [*self.receivers, *self.senders]

    def sync(self, version: int, hurt: tuple[int, int, float] | None = None) -> list[Any]:
        """What each end says of the sync; None from one that was killed or is stopped."""
        for end in self.receivers:
            end.ask(1.0)
        for end in self.senders:
            end.ask(version)
        if hurt is not None:
            which, number, after_s = hurt
            time.sleep(after_s)
            self.ends[which].signal(number)
        answers = []
        for k, end in enumerate(self.ends):
            stopped = hurt is not None and hurt[:2] == (k, signal.SIGSTOP)
            answers.append(None if stopped and not end.has_answered() else end.answer(8.0))
        for answer in answers:
            assert answer is None or not answer[2], answer[2]
        if all(answer is not None and answer[0] for answer in answers[len(self.receivers) :]):
            received = answers[: len(self.receivers)]
            done = [a is None or (a[0] and a[3] == version) for a in received]
            assert all(done), f"the sender says all is well, the receivers {received}"
        return answers

    def well(self, version: int) -> list[Any]:
        answers = self.sync(version)
        assert all(answer is not None and answer[0] for answer in answers), answers
        return answers

    def restart(self, which: int) -> None:
        """Kill one end and start it anew; a receiver has another address then."""
        self.ends[which].close()
        if which >= len(self.receivers):
            self.senders[which - len(self.receivers)] = self._sender(which - len(self.receivers))
            return
        self.receivers[which] = self._receiver(which)
        addresses = [receiver.address for receiver in self.receivers]
        for sender in self.senders:
            sender.ask("addresses", addresses)

    def close(self) -> None:
        for end in self.ends:
            end.close()

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _hurt_at(seed: int) -> tuple[str, int, int, float]:
    rng = random.Random(seed)
    setup = rng.choice(["tcp", "unix", "shm", "chain", "tree of deltas", "two ranks", "keep old"])
    return setup, rng.randrange(6), rng.choice([signal.SIGKILL, signal.SIGSTOP]), rng.uniform(0, 0.025)


def _hurt(setup: str, which: int, number: int, after_s: float) -> None:
    with _Job(SETUPS[setup]) as job:
        job.well(1)
        which %= len(job.ends)
        job.sync(2, (which, number, after_s))
        if number == signal.SIGSTOP and after_s * 1e6 % 2 < 1:
            job.ends[which].signal(signal.SIGCONT)  # it finds a sync that is over
            if not job.ends[which].idle():
                answer = job.ends[which].answer(8.0)
                assert not answer[2], answer[2]
        else:
            job.restart(which)
        job.well(3)
        job.well(4)


@pytest.mark.parametrize(
    "setup, which, number",
    [
        ("tcp", 0, signal.SIGKILL),
        ("shm", 2, signal.SIGKILL),
        ("chain", 0, signal.SIGKILL),
        ("chain", 1, signal.SIGSTOP),
        ("two ranks", 3, signal.SIGSTOP),
    ],
)
def test_a_process_that_dies_or_stops_fails_the_sync_at_the_other_ends_in_time(setup, which, number):
    _hurt(setup, which, number, 0.004)


# --- the same sender and receiver after something went wrong, or nothing for long ---


@pytest.mark.parametrize("raise_at", [0, 1, 5])
def test_a_generator_that_raises_fails_the_sync_and_costs_no_buffers(raise_at):
    with Rig(transport="tcp") as rig:
        for version in range(1, 8):  # more often than there are buffers
            ends = rig.sync(version, lambda: items(0, raise_at=raise_at))
            assert isinstance(ends.sent[0].error, ValueError) and not ends.received[0].ok
            assert f"no tensor {raise_at} today" in str(ends.received[0].error)
        ends = rig.sync(8, lambda: items(8))
        assert ends.ok, ends


def test_a_pause_between_syncs_may_be_longer_than_a_sync(setup="tcp"):
    with Rig(**SETUPS[setup], timeout_s=0.5, sync_limit_s=0.6) as rig:
        rig.well(1)
        time.sleep(1.3)
        rig.well(2)


def test_a_receiver_started_anew_on_its_port_gets_the_next_sync_from_the_same_sender():
    targets = owned(SENTINEL)
    receiver = Receiver(targets, secret=SECRET, host="127.0.0.1", timeout_s=1.0)
    port = int(receiver.address.rpartition(":")[2])
    for transport in ("tcp", "shm"):
        with Sender([receiver.address], secret=SECRET, timeout_s=1.0, transport=transport, delta=True) as sender:
            for version in range(1, 4):
                together = Together()
                got, sent = together.call(receiver.receive, 1.0), together.call(sender.send, model(version), version)
                together.wait(5)
                assert got.ok and sent.ok, (got, sent)
                assert not differing(targets, version)
                receiver.close()
                receiver = Receiver(targets, secret=SECRET, host="127.0.0.1", ports=(port, port), timeout_s=1.0)
    receiver.close()


def test_a_sender_that_gives_up_and_begins_anew_is_heard_at_once():
    with Rig(transport="tcp", timeout_s=5.0, sync_limit_s=20.0) as rig:
        rig.well(1)
        rig.senders[0].close()
        rig.senders[0].timeout_s = rig.senders[0]._outlets._timeout_s = 0.5
        rig.proxies[0].fault = Fault("stall", 30_000)
        together = Together()
        receiver = rig.receivers[0]
        first, lost = together.call(receiver.receive, 5.0), together.call(rig.senders[0].send, model(2), 2)
        time.sleep(0.1)
        lost_limit = time.monotonic() + 3
        while lost.seconds < 0 and time.monotonic() < lost_limit:
            time.sleep(0.02)
        assert isinstance(lost.error, SyncError), lost
        rig.senders[0].timeout_s = 3.0
        again = together.call(rig.senders[0].send, model(3), 3)
        while first.seconds < 0 and time.monotonic() < lost_limit:
            time.sleep(0.01)
        second = together.call(receiver.receive, 5.0)
        together.wait(6)
        assert isinstance(first.error, SyncError) and again.ok and second.ok, (first, again, second)
        assert not differing(rig.targets[0], 3)


@pytest.mark.parametrize("kind", [link.COMMIT, link.END, link.ERROR, link.MANIFEST, 77])
def test_a_frame_that_came_too_late_for_its_sync_does_not_end_the_next_one(kind):
    with Rig(transport="tcp") as rig:
        rig.well(1)
        for to_receiver in rig.senders[0]._links.values():
            to_receiver.send(kind, 5)
        rig.well(2)


def test_a_second_sender_waits_for_its_turn():
    with Rig(transport="tcp", timeout_s=3.0) as rig:
        other = Sender([rig.receivers[0].address], secret=SECRET, timeout_s=3.0)
        together = Together()
        begun = threading.Event()

        def slow(k: int) -> None:
            if k == 4:
                begun.set()
                time.sleep(0.4)

        sent = together.call(rig.senders[0].send, items(1, slow=slow), 1)
        first = together.call(rig.receivers[0].receive, 3.0)
        assert begun.wait(3)
        next_sent = together.call(other.send, model(2), 2)
        together.wait_for(first, 5)
        assert first.ok and not differing(rig.targets[0], 1), first
        second = together.call(rig.receivers[0].receive, 3.0)
        together.wait(5)
        assert sent.ok and next_sent.ok and second.ok and second.value.version == 2, (sent, next_sent, second)
        assert not differing(rig.targets[0], 2)
        other.close()


def test_a_sender_that_dies_after_all_agreed_leaves_the_new_weights_in_use():
    with Rig(transport="tcp", keep_old=True) as rig:
        rig.well(1)
        receiver, commit = rig.receivers[0], rig.receivers[0].sink.commit

        def last_moment() -> None:
            commit()
            for link in list(receiver._links):
                link.close()

        receiver.sink.commit = last_moment
        ends = rig.sync(2)
        receiver.sink.commit = commit
        assert ends.received[0].ok and not ends.sent[0].ok
        rig.well(3)


def test_weights_that_are_half_in_place_are_incomplete_also_where_the_old_were_to_be_kept():
    with Rig(transport="tcp", keep_old=True) as rig:
        rig.well(1)
        sink, install = rig.receivers[0].sink, rig.receivers[0].sink._install

        def broken(tensor: int) -> None:
            if tensor == 3:
                raise RuntimeError("the device is gone")
            install(tensor)

        sink._install = broken
        together = Together()
        got, sent = together.call(rig.receivers[0].receive, 1.0), together.call(rig.senders[0].send, model(2), 2)
        together.wait(5)
        assert not got.ok and "the device is gone" in str(sent.error)
        assert rig.receivers[0].state.startswith("incomplete: ")
        sink._install = install
        rig.well(3)


def test_after_a_failure_nothing_writes_to_the_weights_any_more(monkeypatch):
    with Rig(transport="shm") as rig:
        rig.well(1)
        checksum, slept = memory.checksum, threading.Event()

        def slow(parts: Any) -> int:
            if threading.current_thread().name == "verl-fl-link" and not slept.is_set():
                slept.set()
                time.sleep(0.5)  # between the arrival of a bucket and the copy to where the weights are
            return checksum(parts)

        monkeypatch.setattr(memory, "checksum", slow)
        together = Together()
        got = together.call(rig.receivers[0].receive, 1.0)
        sent = together.call(rig.senders[0].send, model(2), 2)
        assert slept.wait(3)
        rig.receivers[0].abort("enough")
        together.wait_for(got, 5)
        after = {name: tensor.clone() for name, tensor in rig.targets[0].items()}
        together.wait(5)
        time.sleep(0.6)
        assert "enough" in str(got.error) and "enough" in str(sent.error)
        assert not [name for name, tensor in rig.targets[0].items() if not same_bits(tensor, after[name])]
        rig.well(3)


def test_waiting_in_vain_for_a_sender_leaves_the_weights_as_they_are():
    with Rig(drawn=True) as rig:
        rig.well(1)
        with pytest.raises(SyncError, match="no sender came"):
            list(rig.receivers[0].stream(0.1))
        assert (rig.receivers[0].state, rig.receivers[0].version) == ("whole", 1)
        rig.well(2)


def test_closing_a_receiver_ends_its_wait_for_a_sender():
    receiver = Receiver({}, secret=SECRET, host="127.0.0.1")
    together = Together()
    got = together.call(receiver.receive)
    time.sleep(0.05)
    receiver.close()
    together.wait(2)
    assert "closed" in str(got.error)
    with pytest.raises(SyncError, match="closed"):
        receiver.receive()


@pytest.mark.parametrize("drawn", [True, False])
def test_deltas_of_a_model_that_changes_are_right(drawn):
    pairs = list(model(1).items())
    shapes = [pairs, pairs, pairs[3:], pairs[::-1], [*pairs, ("more", torch.ones(3000))], pairs]
    receiver = Receiver(None, secret=SECRET, host="127.0.0.1", timeout_s=1.0)
    with Sender([receiver.address], secret=SECRET, delta=True, bucket_bytes=BUCKET_BYTES, timeout_s=1.0) as sender:
        for version, chosen in enumerate(shapes):
            weights = {name: tensor + 1 if name == "codes" else tensor for name, tensor in chosen}
            weights |= {name: tensor for name, tensor in model(version).items() if name in weights}
            weights = dict(sorted(weights.items(), key=lambda pair: [p[0] for p in chosen].index(pair[0])))
            together = Together()
            sent = together.call(sender.send, iter(weights.items()) if drawn else weights, version)
            got = together.call(lambda: {name: tensor.clone() for name, tensor in receiver.stream(1.0)})
            together.wait(5)
            assert sent.ok and got.ok, (sent, got)
            assert sent.value.mode == ("delta" if version else "full")
            assert list(got.value) == list(weights)
            assert all(same_bits(got.value[name], tensor) for name, tensor in weights.items())
    receiver.close()


def test_tied_weights_that_receivers_want_in_different_dtypes_arrive():
    targets = {"a": torch.zeros(9), "b": torch.zeros(9, dtype=torch.bfloat16)}
    tied = torch.arange(9.0)
    with Receiver(targets, secret=SECRET, host="127.0.0.1") as receiver, Sender([receiver.address], secret=SECRET) as s:
        together = Together()
        sent, got = together.call(s.send, {"a": tied, "b": tied}), together.call(receiver.receive, 2.0)
        together.wait(5)
        assert sent.ok and got.ok, (sent, got)
    assert torch.equal(targets["a"], tied) and torch.equal(targets["b"], tied.bfloat16())


# --- nothing arrived ---


def _one_sync(receiver: Receiver, weights: Any, version: int = 1, **options: Any) -> tuple[Result, Result]:
    with Sender([receiver.address], secret=SECRET, timeout_s=1.0, bucket_bytes=BUCKET_BYTES, **options) as sender:
        together = Together()
        sent, got = together.call(sender.send, weights, version), together.call(receiver.receive, 1.0)
        together.wait(6)
    return sent, got


@pytest.mark.parametrize(
    "weights, message",
    [
        (lambda: iter(()), "no tensor to send"),
        (lambda: {}, "no tensor to send"),
        (lambda: [("a", torch.ones(4)), ("a", torch.ones(4)), ("b", torch.ones(4))], "'a' comes twice"),
        (lambda: {"a": torch.ones(4), "b": torch.ones(4), "stranger": torch.ones(4)}, "1 unknown here: stranger"),
        (lambda: {"a": torch.ones(4)}, "1 missing: b"),
    ],
    ids=["empty stream", "empty mapping", "a name twice", "an unknown name", "a missing name"],
)
def test_a_sync_that_brings_too_little_or_too_much_fails_and_says_which(weights, message):
    targets = {"a": torch.full((4,), -7.0), "b": torch.full((4,), -7.0)}
    with Receiver(targets, secret=SECRET, host="127.0.0.1", timeout_s=1.0, keep_old=True) as receiver:
        sent, got = _one_sync(receiver, weights())
        assert message in str(got.error) and message in str(sent.error)
        assert receiver.state == "empty" and all((t == -7).all() for t in targets.values())
        sent, got = _one_sync(receiver, {"a": torch.ones(4), "b": torch.ones(4)})
        assert sent.ok and got.ok and all((t == 1).all() for t in targets.values())


@pytest.mark.parametrize("drawn", [True, False])
def test_a_tensor_of_no_elements_in_the_middle_arrives(drawn):
    weights = {"a": torch.ones(2000), "none": torch.ones(0, 3), "b": torch.ones(2000)}
    with Receiver(None, secret=SECRET, host="127.0.0.1", delta=False) as receiver:
        receiver.receive, stream = lambda _: {n: t.clone() for n, t in stream(1.0)}, receiver.stream  # type: ignore
        with Sender([receiver.address], secret=SECRET, bucket_bytes=BUCKET_BYTES) as sender:
            together = Together()
            del receiver.receive
            got = together.call(lambda: {n: t.clone() for n, t in receiver.stream(1.0)})
            sent = together.call(sender.send, iter(weights.items()) if drawn else weights)
            together.wait(5)
    assert sent.ok and got.ok, (sent, got)
    assert list(got.value) == ["a", "none", "b"] and got.value["none"].shape == (0, 3)
    assert got.value["none"].device.type == "cpu" and (got.value["b"] == 1).all()


def test_the_last_of_three_buckets_that_is_lost_is_missed(monkeypatch):
    targets = {"a": torch.full((1024,), -7.0), "b": torch.full((1500,), -7.0)}
    send, send_run = StreamEdge._send, StreamEdge._send_run
    with Receiver(targets, secret=SECRET, host="127.0.0.1", timeout_s=0.6, sync_limit_s=60) as receiver:
        monkeypatch.setattr(StreamEdge, "_send", lambda self, lane, b: b.index == 2 or send(self, lane, b))
        shorter = lambda run: Run(run.layout, [k for k in run.buckets if k != 2], run.keep)  # noqa: E731
        monkeypatch.setattr(StreamEdge, "_send_run", lambda self, lane, run: send_run(self, lane, shorter(run)))
        weights = {"a": torch.ones(1024), "b": torch.ones(1500)}
        sent, got = _one_sync(receiver, weights, transport="tcp")
        assert "1 of 3 buckets, the first number 2 with b, did not come" in str(got.error)
        assert not sent.ok and receiver.state.startswith("incomplete: ")
        monkeypatch.undo()
        sent, got = _one_sync(receiver, weights, transport="tcp")
        assert sent.ok and got.ok and (targets["b"] == 1).all()


# --- a peer dies ---

FIVE = {f"t{k}": torch.full((3000,), float(k)) for k in range(5)}


def test_a_receiver_that_never_starts_is_named_within_the_limit():
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    begin = time.monotonic()
    with Sender([nobody], secret=SECRET, timeout_s=1.0) as sender, pytest.raises(SyncError, match="refused") as caught:
        sender.send(FIVE)
    assert caught.value.peer == nobody and caught.value.phase == "dial"
    with (
        Receiver(None, secret=SECRET, host="127.0.0.1") as idle,
        Sender([idle.address], secret=SECRET, timeout_s=0.5) as sender,
        pytest.raises(SyncError, match="no answer in 0.5 s") as caught,
    ):
        sender.send(FIVE)
    assert caught.value.peer == idle.address and caught.value.phase == "begin"
    assert time.monotonic() - begin < 2.5


def test_a_receiver_killed_after_two_of_five_tensors_is_noticed_at_once():
    child = Child("receiver", host="127.0.0.1", secret=SECRET, timeout_s=1.0)
    with Sender([child.address], secret=SECRET, timeout_s=1.0, bucket_bytes=BUCKET_BYTES) as sender:
        child.ask(2.0)

        def slow(k: int) -> None:
            if k == 2:
                child.signal(signal.SIGKILL)
                time.sleep(0.1)

        together = Together()
        sent = together.call(sender.send, items(1, slow=slow), 1)
        together.wait(3)
        assert isinstance(sent.error, SyncError) and sent.error.peer == child.address, sent
        child.close()


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("delta", [True, False])
def test_a_consumer_that_raises_on_the_third_tensor_fails_the_sync_everywhere(delta, says):
    with (
        Receiver(None, secret=SECRET, host="127.0.0.1", delta=delta, timeout_s=1.0) as receiver,
        Sender([receiver.address], secret=SECRET, timeout_s=1.0) as sender,
    ):

        def consume() -> None:
            for k, (name, _) in enumerate(receiver.stream(1.0)):
                if k == 2:
                    if says:
                        receiver.abort(f"no room for {name}")
                    raise MemoryError(name)

        together = Together()
        got, sent = together.call(consume), together.call(sender.send, FIVE, 1)
        together.wait(3)
        assert isinstance(got.error, MemoryError) and isinstance(sent.error, SyncError), (got, sent)
        assert sent.error.peer == receiver.address and sent.error.tensor == "t2"
        assert ("no room for t2" if says else "stopped drawing") in str(sent.error)
        assert receiver.state.startswith("incomplete: ")
        together = Together()
        got = together.call(lambda: {n: t.clone() for n, t in receiver.stream(1.0)})
        sent = together.call(sender.send, FIVE, 2)
        together.wait(3)
        assert got.ok and sent.ok and receiver.state == "whole", (got, sent)
        assert all(torch.equal(got.value[name], FIVE[name]) for name in FIVE)


@pytest.mark.parametrize("delta", [True, False])
def test_a_consumer_that_is_slow_is_waited_for_while_it_goes_on(delta):
    targets = {name: torch.zeros(3000) for name in FIVE}
    options: dict[str, Any] = {"secret": SECRET, "host": "127.0.0.1", "timeout_s": 0.8}
    with (
        Receiver(None, delta=delta, **options) as slow,
        Receiver(targets, **options) as quick,
        Sender([slow.address, quick.address], secret=SECRET, timeout_s=0.8) as sender,
    ):

        def consume() -> int:
            return sum(time.sleep(0.35) is None for _ in slow.stream(1.0))  # 1.75 s in all

        together = Together()
        drawn, got = together.call(consume), together.call(quick.receive, 1.0)
        sent = together.call(sender.send, FIVE, 1)
        together.wait(6)
        assert drawn.ok and drawn.value == 5 and got.ok and sent.ok, (drawn, got, sent)


def test_a_sender_that_is_slow_within_the_limit_succeeds_and_one_beyond_it_fails_everywhere():
    with Rig(transport="tcp", timeout_s=1.0, sync_limit_s=20.0) as rig:
        ends = rig.sync(1, lambda: items(1, slow=lambda k: time.sleep(0.4 if k == 3 else 0)))
        assert ends.ok, ends
        begin = time.monotonic()
        ends = rig.sync(2, lambda: items(2, slow=lambda k: time.sleep(1.8 if k == 3 else 0)))
        assert not ends.received[0].ok and not ends.sent[0].ok and time.monotonic() - begin < 3.5
        assert "the list of tensors did not end" in str(ends.sent[0].error)
        rig.well(3)


# --- long: make soak ---


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_random_faults():
    seed = int(os.environ.get("FAULTS_SEED", secrets.randbelow(1 << 30)))
    print(f"\nFAULTS_SEED={seed} repeats these faults")
    rng = random.Random(seed)
    for k in range(200):
        each = rng.getrandbits(32)
        what: Any = _hurt_at(each) if k % 4 == 3 else (rng.choice(list(SETUPS)), _fault(each, 50_000), rng.randrange(3))
        try:
            with nothing_left():
                (_hurt if k % 4 == 3 else _break)(*what)
        except BaseException as error:
            raise AssertionError(f"fault {k} of FAULTS_SEED={seed}: {what}") from error


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("setup", ["shm", "tree of deltas", "window"])
def test_memory_stays_flat_over_a_thousand_syncs(setup):
    with Rig(**SETUPS[setup], timeout_s=10.0, sync_limit_s=20.0) as rig:
        for version in range(1, 201):
            rig.well(version)
        begin = rss_mib()
        for version in range(201, 1201):
            rig.well(version)
        grown = rss_mib() - begin
    print(f"\n{setup}: {grown:.1f} MiB more after 1,000 syncs")
    assert grown < 4.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_deltas_with_kills_in_between_are_bit_exact():
    rng = random.Random(SENTINEL)
    deltas = kills = 0
    with _Job({"receivers": 2, "delta": True, "transport": "tcp"}) as job:
        for version in range(1, 1001):
            if rng.random() < 0.03:
                which = rng.randrange(len(job.ends))
                job.sync(version, (which, signal.SIGKILL, rng.uniform(0, 0.02)))
                job.restart(which)
                kills += 1
            else:
                deltas += job.well(version)[-1][4] == "delta"
    assert kills > 10 and deltas > 800, (kills, deltas)
