"""Weight sync under faults: every end ends in time, in an error or with the right bytes, and the next sync works."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest
from weight_sync_faults import BUCKET_BYTES, FAULTS, SECRET, Child, Fault, Rig, children, items, nothing_left, rss_mib

from verl_fl.weight_sync import SyncError


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
        assert fault.fired or not must_fire, "the fault was never met"
        assert fault.fired or ends.ok, f"it failed without a fault: {ends}"
        rig.well(3)
        rig.well(4)


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

    def well(self, version: int) -> None:
        answers = self.sync(version)
        assert all(answer is not None and answer[0] for answer in answers), answers

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


_ = (os, SyncError, items, rss_mib)
