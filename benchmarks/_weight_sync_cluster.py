"""The processes of a measurement: senders and receivers, each with its own tensors, and every method between them.

All methods of a run live in the same processes and take turns, so that a busy moment of the machine hits all of them.
Time is from the first sender's start to the last participant's end, on the clock that all processes share. A method
that fails in any process, or stalls, takes these processes down; the caller starts new ones without it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import _weight_sync_payloads as payloads


class MethodFailed(RuntimeError):
    """A method cannot do its transfer here; the processes of the measurement are not to be used any more."""

    def __init__(self, method: str, reason: str) -> None:
        super().__init__(f"{method}: {reason}")
        self.method, self.reason = method, reason


@dataclass(kw_only=True)
class Job:
    """What one process has: its place, its tensors, a pipe to each peer for addresses and other small messages."""

    role: str
    """``sender`` or ``receiver``."""
    rank: int
    """Among the processes of this role."""
    num_senders: int
    num_receivers: int
    payload: payloads.Payload
    timeout_s: float
    host: str = "127.0.0.1"
    """This process's own address."""
    netns: str = ""
    """Network namespace that it lives in."""
    model: str = ""
    """Folder or file with the sender's values; random ones where empty."""
    ray_address: str = ""
    links: list[Connection] = field(default_factory=list)
    tensors: payloads.Tensors = field(default_factory=dict)

    @property
    def is_sender(self) -> bool:
        """Whether this process sends."""
        return self.role == "sender"

    def tell(self, message: Any) -> None:
        """The same message to every peer."""
        for link in self.links:
            link.send(message)

    def hear(self) -> list[Any]:
        """One message of every peer.

        Raises:
            TimeoutError: a peer said nothing.
        """
        for rank, link in enumerate(self.links):
            if not link.poll(self.timeout_s):
                raise TimeoutError(f"{self.role} {self.rank} heard nothing of its peer {rank} in {self.timeout_s:g} s")
        return [link.recv() for link in self.links]


class Cluster:
    """Senders and receivers as processes of this one; closing it ends them."""

    def __init__(self, jobs: list[Job]) -> None:
        context = multiprocessing.get_context("spawn")
        senders = [job for job in jobs if job.is_sender]
        receivers = [job for job in jobs if not job.is_sender]
        for sender in senders:
            for receiver in receivers:
                ours, theirs = context.Pipe()
                sender.links.append(ours)
                receiver.links.append(theirs)
        self.timeout_s = jobs[0].timeout_s + 15  # a method's own error, which says more, comes first
        self.pipes: list[Connection] = []
        self.processes = []
        self.roles = [f"{job.role} {job.rank}" for job in senders + receivers]
        self.senders = range(len(senders))
        self.receivers = range(len(senders), len(jobs))
        try:
            for job in senders + receivers:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(job, theirs), daemon=True)
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)
            for job in jobs:
                for link in job.links:
                    link.close()
            self._collect("", range(len(self.pipes)), 120 + self.timeout_s)  # torch is imported, the tensors are made
        except BaseException:
            self.close()
            raise

    def open(self, method: str, **options: Any) -> None:
        """Every process sets the method up: buffers, connections."""
        self._all(method, "open", method, options)

    def change(self, **how: Any) -> list[Any]:
        """Every sender changes its values, in the same way."""
        return self._all("", "change", how, who=self.senders)

    def sync(self, method: str, variant: str) -> float:
        """Seconds of one transfer."""
        receivers = list(self.receivers)
        for index in receivers:
            self.pipes[index].send(("sync", method, variant))
        self._collect(method, receivers, self.timeout_s)  # each says that it is about to receive
        time.sleep(0.005)
        for index in self.senders:
            self.pipes[index].send(("sync", method, variant))
        stamps = self._collect(method, range(len(self.pipes)), self.timeout_s)
        return max(end for _, end in stamps) - min(stamps[index][0] for index in self.senders)

    def verify(self, method: str) -> None:
        """All bytes that the method brought are the sender's.

        Raises:
            MethodFailed: they are not.
        """
        answers = self._all(method, "digest", method)
        expected = answers[0][0]
        assert any(brought for _, *brought in answers), f"{method} says that it brought nothing to anybody"
        for role, (sent, *brought) in zip(self.roles, answers, strict=True):
            if any(found != expected for found in ([sent] if sent else []) + brought):
                raise MethodFailed(method, f"{role} has other bytes than the sender")

    def close(self) -> None:
        """All processes have ended."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(("stop",))
        deadline = time.monotonic() + 5
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()

    def _all(self, method: str, *message: Any, who: Any = None) -> list[Any]:
        who = range(len(self.pipes)) if who is None else who
        for index in who:
            self.pipes[index].send(message)
        return self._collect(method, who, self.timeout_s)

    def _collect(self, method: str, who: Any, timeout_s: float) -> list[Any]:
        """One answer of each; the first failure is everyone's, since the others may wait for the one that failed."""
        waiting = {self.pipes[index]: index for index in who}
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(self.roles[index] for index in waiting.values())
                raise MethodFailed(method, f"no answer in {timeout_s:g} s from {late}")
            for pipe in ready:
                index = waiting.pop(pipe)
                try:
                    status, value = pipe.recv()
                except (EOFError, ConnectionError):
                    self.processes[index].join(5)
                    status, value = "error", f"its process ended with {self.processes[index].exitcode}"
                if status == "error":
                    raise MethodFailed(method, f"{self.roles[index]}: {value}")
                answers[index] = value
        return [answers[index] for index in who]


@contextlib.contextmanager
def cluster(jobs: list[Job]) -> Iterator[Cluster]:
    """A :class:`Cluster` that is closed at the end."""
    made = Cluster(jobs)
    try:
        yield made
    finally:
        made.close()


def jobs_on_loopback(payload: payloads.Payload, num_receivers: int, timeout_s: float, ray_address: str) -> list[Job]:
    """One sender and its receivers on 127.0.0.1."""
    common: dict[str, Any] = {
        "num_senders": 1,
        "num_receivers": num_receivers,
        "payload": payload,
        "timeout_s": timeout_s,
        "ray_address": ray_address,
    }
    receivers = [Job(role="receiver", rank=rank, **common) for rank in range(num_receivers)]
    return [Job(role="sender", rank=0, **common), *receivers]


def _serve(job: Job, pipe: Connection) -> None:
    """A process of the cluster: does what it is told until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its processes itself
    _end_with_parent()
    if job.netns:
        import _netns

        _netns.enter(job.netns)  # before anything can start a thread, which would stay outside
    worker = _Worker(job, pipe)
    while True:
        try:
            command, *arguments = pipe.recv()
        except EOFError:
            break
        if command == "stop":
            break
        worker.answer(command, arguments)
    worker.close()
    os._exit(0)  # a rival's threads may not hold the process


def _end_with_parent() -> None:
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class _Worker:
    def __init__(self, job: Job, pipe: Connection) -> None:
        self.job, self.pipe = job, pipe
        self.endpoints: dict[str, Any] = {}
        self.adamw: payloads.AdamW | None = None
        self.masters: list[Any] = []
        self.version = 0
        self.answer("make", [])

    def answer(self, command: str, arguments: list[Any]) -> None:
        """Run one command; its result, or what went wrong, goes to the parent."""
        try:
            reply = ("ok", getattr(self, command)(*arguments))
        except BaseException as error:
            first_line = (str(error).strip() or "no message").splitlines()[0]
            reply = ("error", f"{type(error).__name__}: {first_line}")
            if os.environ.get("WEIGHT_SYNC_TRACEBACK"):
                import traceback

                traceback.print_exc()
        self.pipe.send(reply)

    def make(self) -> None:
        import torch

        torch.set_num_threads(1)  # two processes or more share the cores; spinning OpenMP threads slow all of them
        job = self.job
        if job.is_sender and job.model:
            job.tensors, self.masters = payloads.load(job.payload, job.model)
        else:
            job.tensors = payloads.make(job.payload, 0 if job.is_sender else None)

    def open(self, method: str, options: dict[str, Any]) -> None:
        import _weight_sync_methods

        self.endpoints[method] = _weight_sync_methods.endpoint(method)(self.job, **options)

    def change(self, how: dict[str, Any]) -> float | None:
        if "lr" not in how:
            self.version += 1
            payloads.change(self.job.tensors, self.version)
            return None
        if self.adamw is None:
            self.adamw = payloads.AdamW(self.job.tensors, self.masters, how["lr"])
        if how["toggle"]:
            self.adamw.toggle()
            return None
        return self.adamw.step()

    def sync(self, method: str, variant: str) -> tuple[float, float]:
        endpoint = self.endpoints[method]
        if not self.job.is_sender:
            self.pipe.send(("ok", None))
        start = time.monotonic()
        endpoint.sync(variant)
        return start, time.monotonic()

    def digest(self, method: str) -> list[str]:
        """Of what this process sends, if it does; then of what the method brought here, if it did."""
        found = [payloads.digest(self.job.tensors)] if self.job.is_sender else [""]
        return [*found, *(payloads.digest(tensors) for tensors in self.endpoints[method].received())]

    def close(self) -> None:
        for endpoint in self.endpoints.values():
            with contextlib.suppress(Exception):
                endpoint.close()
