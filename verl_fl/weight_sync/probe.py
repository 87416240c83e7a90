"""How fast do weights travel, to another node or on this one? ``python -m verl_fl.weight_sync.probe --help``.

Needs torch and xxhash only. ``verl-fl doctor --link`` asks the first question, ``scripts/device_check.sh`` the second.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import statistics
import sys
import time
from typing import Any

import torch

from verl_fl import _env
from verl_fl.weight_sync._errors import SyncError
from verl_fl.weight_sync.receiver import Receiver
from verl_fl.weight_sync.sender import Sender

SIZE_BYTES = 64 << 20
_TENSORS, _ROUNDS, _LIMIT_S = 8, 5, 10.0


def _weights(device: str, *, value: int) -> dict[str, torch.Tensor]:
    numel = SIZE_BYTES // _TENSORS // 2
    return {f"probe.{k}": torch.full((numel,), value + k, dtype=torch.bfloat16, device=device) for k in range(_TENSORS)}


def listen(*, host: str | None = None, ports: tuple[int, int] | None = None, timeout_s: float = 600.0) -> int:
    """Serve one measurement: say how to reach this node, take what comes, and return when the other end is done.

    Returns:
        0, or 1 where nobody came or the measurement failed.
    """
    secret = _env.read(_env.SECRET) or secrets.token_hex(16)
    with Receiver(_weights("cpu", value=-1), secret=secret, host=host, ports=ports, delta=False) as receiver:
        print(f"on the other node, within {timeout_s:g} s:\n")
        print(f"    {_env.SECRET}={secret} verl-fl doctor --link {receiver.address}\n", flush=True)
        try:
            while not receiver.about.get("last"):
                report = receiver.receive(timeout_s)
                print(f"got {report}", flush=True)
        except SyncError as error:
            print(f"verl-fl: {error}", file=sys.stderr)
            return 1
    return 0


def measure(
    address: str, *, transports: tuple[str, ...] = ("auto", "tcp"), device: str = "cpu", secret: str | None = None
) -> list[dict[str, Any]]:
    """Send a model of 64 MB some times by each transport; every byte is verified at the other end.

    Returns:
        For each transport what it stood for, and the median GB/s (1e9 bytes) but for the first, which warms up.

    Raises:
        SyncError: the other end can't be reached, or a sync failed.
        ValueError: there is no secret, or the address is none.
    """
    found = []
    for number, transport in enumerate(transports):
        with Sender([address], secret=secret, transport=transport, timeout_s=15.0) as sender:
            speeds, begin = [], time.monotonic()
            for version in range(_ROUNDS + 1):
                over = version == _ROUNDS or time.monotonic() - begin > _LIMIT_S
                last = over and number == len(transports) - 1
                report = sender.send(_weights(device, value=version), version, {"last": last})
                speeds.append(report.gbps)
                if over:
                    break
            found.append(
                {
                    "transport": transport,
                    "used": report.edges[address],
                    "gbps": round(statistics.median(speeds[1:] or speeds), 3),
                    "rounds": len(speeds),
                }
            )
    return found


def _take_all(pipe: Any, secret: str, device: str) -> None:
    targets = _weights(device, value=-1)
    with Receiver(targets, secret=secret, host="127.0.0.1", delta=False) as receiver:
        pipe.send(receiver.address)
        while not receiver.about.get("last"):
            version = receiver.receive(60.0).version
        expected = _weights("cpu", value=version)
        pipe.send(all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in targets.items()))


def on_this_node(device: str) -> list[dict[str, Any]]:
    """Send from ``device`` to the same device in another process, by every transport of one host.

    Raises:
        RuntimeError: other weights arrived, or the other process died.
    """
    secret = secrets.token_hex(16)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    child = context.Process(target=_take_all, args=(theirs, secret, device), daemon=True)
    child.start()
    try:
        if not mine.poll(120):
            raise RuntimeError("the receiving process did not start within 120 s")
        found = measure(mine.recv(), transports=("tcp", "unix", "shm"), device=device, secret=secret)
        if not mine.poll(60) or not mine.recv():
            raise RuntimeError("other weights arrived than were sent")
        return found
    finally:
        child.join(10)
        if child.is_alive():
            child.kill()
            child.join()


def main(arguments: list[str] | None = None) -> int:
    """The command; see its ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m verl_fl.weight_sync.probe", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--listen", action="store_true", help="serve one measurement from another node")
    what.add_argument("--to", metavar="ADDRESS", help="measure to a node that listens: tcp://HOST:PORT")
    what.add_argument("--device", help="measure on this node, from and to this device: cpu, or as torch names it")
    options = parser.parse_args(arguments)
    if options.listen:
        return listen()
    try:
        rows = measure(options.to) if options.to else on_this_node(options.device)
    except (SyncError, ValueError, RuntimeError) as error:
        print(f"verl-fl: {error}", file=sys.stderr)
        return 1
    for row in rows:
        print(f"{row['transport']:6} {row['gbps']:8.2f} GB/s   by {row['used']}, {row['rounds']} rounds, verified")
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
