"""``weight_sync.py --links``: verl-fl's relay, several senders and delta sync over links of 1 Gbit/s between hosts.

The hosts are network namespaces of this machine (see _netns.py). No rival runs here: each ratio is of two of our own
runs over the same links, one of them the plain way.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import _netns
import _weight_sync_payloads as payloads
from _weight_sync_cluster import Cluster, Job, MethodFailed, cluster

Result = dict[str, Any]
NUM_RELAYS = 8
LR = 1e-6


def measure(
    names: list[str], payload: payloads.Payload, repeats: int, timeout_s: float, model: str, delta_steps: int
) -> Iterator[Result]:
    """One result a scenario: the seconds of each way, the ratio, or the reason why there is none."""
    scenarios: dict[str, Callable[[], Result]] = {
        "relay": lambda: _relay(payload, repeats, timeout_s),
        "senders": lambda: _senders(payload, repeats, timeout_s),
        "delta": lambda: _delta(payload, repeats, timeout_s, model, delta_steps),
    }
    for name in names:
        print(f"== {name}: {payload.name}, {payload.size_bytes / 1e6:.0f} MB", file=sys.stderr)
        result: Result = {"scenario": name, "payload": payload.name, "payload_bytes": payload.size_bytes}
        try:
            yield {**result, **scenarios[name]()}
        except MethodFailed as failure:
            yield {**result, "ratio": None, "reason": str(failure)}


def _relay(payload: payloads.Payload, repeats: int, timeout_s: float) -> Result:
    """The same bytes to 8 hosts and to one of them; each host, the sender's too, has a link of 1 Gbit/s."""
    with (
        _netns.network(["1gbit"] * (1 + NUM_RELAYS)) as hosts,
        cluster(_jobs(hosts, 1, payload, timeout_s)) as processes,
    ):
        processes.open("fl:one", receivers=1)
        processes.open("fl:all")
        one, every = _in_turn(processes, ["fl:one", "fl:all"], repeats)
    return {"receivers": NUM_RELAYS, "one_s": one, "all_s": every, "ratio": round(every / one, 3)}


def _senders(payload: payloads.Payload, repeats: int, timeout_s: float) -> Result:
    """Two senders with 1 Gbit/s each, which share the bytes, and one of them alone; the receiver has 2 Gbit/s."""
    with (
        _netns.network(["1gbit", "1gbit", "2gbit"]) as hosts,
        cluster(_jobs(hosts, 2, payload, timeout_s)) as processes,
    ):
        processes.open("fl:one", senders=1)
        processes.open("fl:two", senders=2)
        one, two = _in_turn(processes, ["fl:one", "fl:two"], repeats)
    return {"senders": 2, "one_s": one, "two_s": two, "ratio": round(one / two, 3)}


def _delta(payload: payloads.Payload, repeats: int, timeout_s: float, model: str, steps: int) -> Result:
    """Changes alone and everything, for the first AdamW step (back and forth, for its repeats) and for later ones."""
    with _netns.network(["1gbit", "1gbit"]) as hosts:
        jobs = _jobs(hosts, 1, payload, timeout_s)
        jobs[0].model = model
        with cluster(jobs) as processes:
            processes.open("fl:full")
            processes.open("fl:delta", delta=True, own=True)
            _both(processes)  # connections are warm, and the receiver has what the changes start from
            (first_share,) = processes.change(lr=LR, toggle=False)
            first = [_both(processes)]
            while len(first) < repeats:
                processes.change(lr=LR, toggle=True)
                first.append(_both(processes))
            if len(first) % 2 == 0:  # the values after the step, which the next one starts from
                processes.change(lr=LR, toggle=True)
                _both(processes)
            later, shares = [], []
            for _ in range(steps - 1):
                shares += processes.change(lr=LR, toggle=False)
                later.append(_both(processes))
    result = {"values": model or "random", "lr": LR, "first": _summary(first, first_share)}
    if later:
        result["later"] = _summary(later, statistics.median(shares))
    return {**result, "ratio": result["first"]["ratio"]}


def _both(processes: Cluster) -> tuple[float, float]:
    """Seconds of a full sync and of a delta sync to the same values, each into its own tensors and verified."""
    full, delta = (processes.sync(method, "") for method in ("fl:full", "fl:delta"))
    processes.verify("fl:full")
    processes.verify("fl:delta")
    return full, delta


def _summary(seconds: list[tuple[float, float]], changed: float) -> Result:
    full, delta = (statistics.median(times) for times in zip(*seconds, strict=True))
    summary = {"full_s": round(full, 4), "delta_s": round(delta, 4), "changed": round(changed, 5)}
    return {**summary, "ratio": round(full / delta, 2)}


def _jobs(hosts: list[_netns.Host], num_senders: int, payload: payloads.Payload, timeout_s: float) -> list[Job]:
    """The first hosts send, the others receive."""
    return [
        Job(
            role="sender" if index < num_senders else "receiver",
            rank=index if index < num_senders else index - num_senders,
            num_senders=num_senders,
            num_receivers=len(hosts) - num_senders,
            payload=payload,
            timeout_s=timeout_s,
            host=host.address,
            netns=host.name,
        )
        for index, host in enumerate(hosts)
    ]


def _in_turn(processes: Cluster, methods: list[str], repeats: int) -> list[float]:
    """Median seconds of each method; the first sync of each does not count."""
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for repeat in range(repeats + 1):
        for method in methods:
            processes.change()
            taken = processes.sync(method, "")
            processes.verify(method)
            if repeat:
                seconds[method].append(taken)
    return [round(statistics.median(times), 4) for times in seconds.values()]
