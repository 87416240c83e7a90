"""Processes with a device each, in one process group: two, or one where there is no second device."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

from verl_fl.platform.base import Platform
from verl_fl.testing.conformance._check import Failed
from verl_fl.testing.conformance._fresh import origin

_LIMIT_S = 90.0


def world_size(platform: Platform) -> int:
    """Two where there are devices for it: on the host both ranks share the one there is."""
    return 2 if platform.device_name == "cpu" else min(2, platform.device_count())


def run(platform: Platform, body: str, argument: str = "") -> None:
    """Run ``rank_<body>`` of ``training.py`` on every rank.

    Raises:
        Failed: a rank raised, ended or hung; with what it said last.
    """
    size = world_size(platform)
    target = f"{origin(type(platform))}:{type(platform).__qualname__}"
    with (
        tempfile.TemporaryDirectory() as folder,
        open(f"{folder}/0.log", "w+") as first,
        open(f"{folder}/1.log", "w+") as second,
    ):
        logs = [first, second][:size]
        command = [sys.executable, "-m", "verl_fl.testing.conformance._pair", target, body, f"{folder}/store"]
        ranks = [
            subprocess.Popen([*command, str(rank), argument], stdout=log, stderr=subprocess.STDOUT)
            for rank, log in enumerate(logs)
        ]
        try:
            _wait(ranks, logs, body)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _wait(ranks: list[subprocess.Popen], logs: list, body: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while any(process.poll() is None for process in ranks):
        if time.monotonic() > deadline:
            raise Failed(f"{body} did not end in {_LIMIT_S:g} s")
        if any(process.poll() for process in ranks):
            break
        time.sleep(0.05)
    for rank, (process, log) in enumerate(zip(ranks, logs, strict=True)):
        if process.poll():
            log.seek(0)
            said = log.read()
            _, marked, message = said.rpartition("FAILED: ")
            last = message if marked else (said.strip().splitlines() or ["(it said nothing)"])[-1]
            raise Failed(f"rank {rank}: {last.strip()}")


def main(target: str, body: str, store: str, rank: str, argument: str) -> None:
    """One rank."""
    import torch.distributed as dist

    from verl_fl.testing._target import load
    from verl_fl.testing.conformance import training

    platform = load(target)()
    if platform.device_name != "cpu":
        platform.set_device(int(rank))
    else:
        platform.device_module  # noqa: B018  settles what a platform does once
    own = platform.communication_backend_name()
    backend = f"cpu:{own}" if platform.device_name == "cpu" else f"cpu:gloo,{platform.device_name}:{own}"
    where = f"file://{os.path.abspath(store)}"
    dist.init_process_group(
        backend,
        init_method=where,
        rank=int(rank),
        world_size=world_size(platform),
        timeout=timedelta(seconds=_LIMIT_S / 2),
    )
    getattr(training, f"rank_{body}")(platform, int(rank), argument)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:
        print(f"FAILED: {error if isinstance(error, Failed) else f'{type(error).__name__}: {error}'}", flush=True)
        os._exit(1)  # a rank that waits for the other would otherwise keep this one alive
    os._exit(0)  # at the end of the interpreter gloo's threads abort it now and then, and the work is done
