"""Runs the checks in a process of their own, so that whatever a platform does, there is a report."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import date
from importlib.util import find_spec
from typing import Any

from verl_fl._errors import explain
from verl_fl._version import __version__
from verl_fl.testing.conformance import CHECKS
from verl_fl.testing.conformance._check import Check, Failed, Skip
from verl_fl.testing.conformance.report import Report, Result


class Unusable(Exception):
    """The target can't be asked anything: not importable, or not a platform."""


def select_checks(only: Iterable[str] = (), skip: Iterable[str] = ()) -> list[Check]:
    """The checks to run, in order.

    Raises:
        ValueError: there is no check of that name.
    """
    only, skip = list(only), list(skip)
    unknown = [name for name in (*only, *skip) if name not in CHECKS]
    if unknown:
        raise ValueError(explain(f"there is no check {unknown[0]!r}", legal=", ".join(CHECKS)))
    return [check for name, check in CHECKS.items() if (not only or name in only) and name not in skip]


def answer(check: Check, platform: Any) -> Result:
    """Ask one check of a platform, here."""
    start = time.monotonic()
    verdict, message = "passed", ""
    missing = [package for package in check.needs if find_spec(package) is None]
    try:
        if missing:
            raise Skip(f"needs {', '.join(missing)}, which is not installed")
        check.run(platform)
    except Skip as reason:
        verdict, message = "skipped", str(reason)
    except Failed as problem:
        verdict, message = "failed", str(problem)
    except BaseException as error:  # a platform may raise anything; its author needs the place
        if isinstance(error, KeyboardInterrupt):
            raise
        verdict, message = "failed", f"{type(error).__name__}: {error}{_place(error)}"
    seconds = round(time.monotonic() - start, 3)
    return Result(name=check.name, verdict=verdict, seconds=seconds, message=message, why=check.why, group=check.group)


def _place(error: BaseException) -> str:
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "verl_fl/testing/conformance" not in frame.filename] or frames
    return f"\n  at: {own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else ""


def run(
    target: str,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    timeout_s: float = 120.0,
    tell: Callable[[Result], None] = lambda result: None,
) -> Report:
    """Run the checks on ``target`` and report; one that hangs or ends its process fails, and the rest go on.

    Args:
        target: ``package.module:Class`` or ``path/to/file.py:Class``.
        timeout_s: limit of each check, and of importing the target.
        tell: called with each result as it comes.

    Raises:
        Unusable: the target can't be imported in that time, or is no complete platform.
        ValueError: there is no check of a name in ``only`` or ``skip``.
    """
    waiting = select_checks(only, skip)
    report = Report(target=target, date=date.today().isoformat(), verl_fl=__version__, python=sys.version.split()[0])
    while waiting:
        waiting = _some(report, waiting, timeout_s, tell)
    return report


def _some(report: Report, waiting: list[Check], timeout_s: float, tell: Callable[[Result], None]) -> list[Check]:
    """One child process, until it has answered all or has to be given up; returns the checks that are left."""
    done: set[str] = set()

    def left() -> list[Check]:
        return [check for check in waiting if check.name not in done]

    def take(result: Result) -> None:
        done.add(result.name)
        report.results.append(result)
        tell(result)

    with tempfile.TemporaryFile("w+") as log, _Child(report.target, waiting, log) as child:
        limit, asked = timeout_s, ""
        while True:
            try:
                message = child.receive(limit)
            except (EOFError, TimeoutError) as end:
                problem = f"did not end in {limit:g} s" if isinstance(end, TimeoutError) else _ended(child, log)
                if not asked:
                    raise Unusable(explain(f"importing the platform {problem}", asked=report.target)) from None
                seconds = limit if isinstance(end, TimeoutError) else 0.0
                take(_lost(CHECKS[asked], problem, seconds))
                return left()
            if "unusable" in message:
                raise Unusable(message["unusable"])
            if "platform" in message:
                report.platform, report.torch = message["platform"], message["torch"]
                report.simulated = message["simulated"]
            elif "asked" in message:
                asked = message["asked"]
            else:
                take(Result(**message))
                if not left():
                    return []


def _lost(check: Check, problem: str, seconds: float) -> Result:
    return Result(name=check.name, verdict="failed", seconds=seconds, message=problem, why=check.why, group=check.group)


def _ended(child: _Child, log: Any) -> str:
    log.seek(0)
    said = log.read().strip().splitlines()
    return f"ended its process (status {child.status()})" + (f"; it said last: {said[-1]}" if said else "")


class _Child:
    """The process that asks; it speaks JSON lines on a pipe of its own, and may print what it likes."""

    def __init__(self, target: str, checks: list[Check], log: Any) -> None:
        self._read, write = os.pipe()
        self._pending = b""
        command = [sys.executable, "-m", "verl_fl.testing.conformance._child", str(write), target]
        command += [check.name for check in checks]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[write], start_new_session=True
        )
        os.close(write)

    def receive(self, limit_s: float) -> dict[str, Any]:
        """The next message.

        Raises:
            TimeoutError: none came in time.
            EOFError: the process has ended.
        """
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._pending:
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            chunk = os.read(self._read, 1 << 16)
            if not chunk:
                raise EOFError
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def status(self) -> int | None:
        """Its exit status, or None while it runs."""
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            return None

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *exception: object) -> None:
        import contextlib
        import signal

        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what a check started as well
        self._process.wait()
        os.close(self._read)
