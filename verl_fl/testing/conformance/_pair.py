"""Processes with a device each, in one process group: two, or one where there is no second device."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TextIO

from verl_fl.platform.base import Platform
from verl_fl.testing._target import spell
from verl_fl.testing.conformance import _limit, _place
from verl_fl.testing.conformance._check import Failed

_START = "import sys; from verl_fl.testing.conformance import _pair; _pair.entry(sys.argv[1:])"
_FOUND, _RAISED = "conformance found: ", "conformance was ended by: "


def world_size(platform: Platform) -> int:
    """Two where there are devices for it: on the host both ranks share the one there is."""
    return 2 if platform.device_name == "cpu" else min(2, platform.device_count())


def run(platform: Platform, body: str, argument: str = "") -> None:
    """Run ``rank_<body>`` of ``collectives.py`` or ``training.py`` on every rank.

    Raises:
        Failed: a rank raised, ended or hung; with what it said last.
    """
    size, limit = world_size(platform), _limit.left()
    with (
        tempfile.TemporaryDirectory() as folder,
        open(f"{folder}/0.log", "w+", errors="replace") as first,
        open(f"{folder}/1.log", "w+", errors="replace") as second,
    ):
        logs = [first, second][:size]
        command = [sys.executable, "-c", _START, spell(type(platform)), body, f"{folder}/store"]
        command.append(str(time.monotonic() + limit))  # a clock that all processes of a machine share
        ranks = [
            subprocess.Popen([*command, str(rank), argument], stdout=log, stderr=subprocess.STDOUT)
            for rank, log in enumerate(logs)
        ]
        try:
            _wait(ranks, logs, body, limit)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _wait(ranks: list[subprocess.Popen], logs: Sequence[TextIO], body: str, limit: float) -> None:
    deadline = time.monotonic() + limit
    while any(process.poll() is None for process in ranks) and not any(process.poll() for process in ranks):
        if time.monotonic() > deadline:
            hung = [f"rank {r}: it hung{_place.stuck(_text(logs[r]))}" for r, p in enumerate(ranks) if p.poll() is None]
            raise Failed("\n".join([f"{body} did not end in {limit:.0f} s", *hung]))
        time.sleep(0.05)
    ended = [(rank, process.returncode, _text(logs[rank])) for rank, process in enumerate(ranks) if process.poll()]
    if ended:  # the rank that found a wrong number, not the one that has then lost its peer
        rank, status, said = max(ended, key=lambda rank: _FOUND in rank[2])
        raise Failed(f"rank {rank}: {_last_words(status, said)}")


def _text(log: TextIO) -> str:
    log.seek(0)
    return log.read()


def _last_words(status: int, said: str) -> str:
    for mark in (_FOUND, _RAISED):
        if mark in said:
            return said.rpartition(mark)[2].strip()
    last = _place.before(said)
    return f"it ended with status {status}" + (f"; it said last: {last}" if last else "") + _place.stuck(said)


def main(target: str, body: str, store: str, end: str, rank: str, argument: str) -> None:
    """One rank."""
    faulthandler.enable()
    left = float(end) - time.monotonic()
    faulthandler.dump_traceback_later(left * 0.9)
    import torch.distributed as dist

    from verl_fl.testing._target import load
    from verl_fl.testing.conformance import collectives, training

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
        timeout=timedelta(seconds=left * 2),  # the kit ends a hang sooner, and says where each rank was
    )
    run_body = {"collectives": collectives.rank_collectives, "fsdp2": training.rank_fsdp2}[body]
    run_body(platform, int(rank), argument)
    dist.destroy_process_group()


def entry(arguments: list[str]) -> None:
    """The process of one rank; it ends without a word from the threads of torch or of an SDK."""
    try:
        main(*arguments)
    except Failed as problem:
        print(f"{_FOUND}{problem}", flush=True)
        os._exit(1)  # a rank that waits for the other would otherwise keep this one alive
    except Exception as error:
        print(f"{_RAISED}{type(error).__name__}: {error}{_place.raised(error)}", flush=True)
        os._exit(1)
    os._exit(0)  # the work is done, and at the interpreter's end a thread of torch aborts it now and then
