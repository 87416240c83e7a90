"""Runs the checks in a process of their own, so that whatever a platform does, there is a report."""

from __future__ import annotations

import json
import math
import os
import platform
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import date
from importlib.util import find_spec
from typing import Any, TextIO

from verl_fl._errors import explain
from verl_fl._version import __version__
from verl_fl.testing._target import spell
from verl_fl.testing.conformance import CHECKS, _limit, _place
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
    chosen = [check for name, check in CHECKS.items() if (not only or name in only) and name not in skip]
    if not chosen:
        raise ValueError(explain("no check is left to run", asked=f"only {', '.join(only)}; skip {', '.join(skip)}"))
    return chosen


def answer(check: Check, instance: Any, limit_s: float = 120.0) -> Result:
    """Ask one check of a platform, here; only what the check starts heeds the limit."""
    start = time.monotonic()
    _limit.start(limit_s)
    verdict, message = "passed", ""
    missing = [package for package in check.needs if find_spec(package) is None]
    try:
        if missing:
            raise Skip(f"needs {', '.join(missing)}, which is not installed")
        message = check.run(instance) or ""
    except Skip as reason:
        verdict, message = "skipped", str(reason)
    except Failed as problem:
        verdict, message = "failed", str(problem)
    except BaseException as error:  # a platform may raise anything; its author needs the place
        if isinstance(error, KeyboardInterrupt):
            raise
        verdict, message = "failed", f"{type(error).__name__}: {error}{_place.raised(error)}"
    seconds = round(time.monotonic() - start, 3)
    return Result(name=check.name, verdict=verdict, seconds=seconds, message=message, why=check.why, group=check.group)


def run(
    target: str | type,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    timeout_s: float = 120.0,
    within_s: float = math.inf,
    tell: Callable[[Result], None] = lambda result: None,
) -> Report:
    """Run the checks on ``target`` and report; one that hangs or ends its process fails, and the rest go on.

    Args:
        target: ``package.module:Class``, ``path/to/file.py:Class``, or the class.
        timeout_s: limit of each check, and of importing the target.
        within_s: limit of the whole run; a check that it leaves no time for has failed.
        tell: called with each result as it comes.

    Raises:
        Unusable: the target can't be imported in that time, or is no complete platform.
        ValueError: there is no check of a name in ``only`` or ``skip``, or none is left; a limit is not positive.
    """
    if not (0 < timeout_s < math.inf and within_s > 0):
        raise ValueError(
            explain("a limit is no time", asked=f"{timeout_s} s a check, {within_s} s in all", legal="> 0")
        )
    waiting, name, end = select_checks(only, skip), spell(target), time.monotonic() + within_s
    report = Report(target=name, date=date.today().isoformat(), verl_fl=__version__, python=sys.version.split()[0])
    report.machine = f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores"

    def take(result: Result) -> None:
        report.results.append(result)
        tell(result)

    while waiting and time.monotonic() < end:
        waiting = _some(report, waiting, timeout_s, end, take)
    for check in waiting:
        fix = "find out why the checks before it took so long, or give the run more time"
        take(_lost(check, explain(f"not asked: the run's {within_s:g} s were over", fix=fix), 0.0))
    return report


def _some(
    report: Report, waiting: list[Check], timeout_s: float, end: float, take: Callable[[Result], None]
) -> list[Check]:
    """One child process, until it has answered all or has to be given up; returns the checks that are left.

    Raises:
        Unusable: the target can't be asked. Where an earlier process could ask it, only the next check has failed.
    """
    left = {check.name: check for check in waiting}
    asked = ""

    def lose(problem: str, seconds: float = 0.0) -> None:
        name = asked if asked in left else next(iter(left))  # it may end between two checks
        take(_lost(left.pop(name), problem, seconds))

    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        _Child(report.target, waiting, timeout_s, end, log) as child,
    ):
        while left:
            limit = max(0.0, min(timeout_s, end - time.monotonic()))
            try:
                message = child.receive(limit)
            except (EOFError, TimeoutError) as stop:
                hung = isinstance(stop, TimeoutError)
                problem = _hung(limit, log) if hung else _ended(child, log)
                if asked:
                    lose(problem, limit if hung else 0.0)
                    break
                message = {"unusable": explain(f"importing the platform {problem}", asked=report.target)}
            if "unusable" in message:
                if not report.results:
                    raise Unusable(message["unusable"])
                lose(message["unusable"])
                break
            if "platform" in message:
                report.platform, report.torch = message["platform"], message["torch"]
                report.simulated = message["simulated"]
            elif "asked" in message:
                asked = message["asked"]
            else:
                take(Result(**message))
                del left[asked]
    return list(left.values())


def _lost(check: Check, problem: str, seconds: float) -> Result:
    return Result(name=check.name, verdict="failed", seconds=seconds, message=problem, why=check.why, group=check.group)


def _hung(limit: float, log: TextIO) -> str:
    return f"did not end in {limit:.3g} s{_place.stuck(_text(log))}"


def _ended(child: _Child, log: TextIO) -> str:
    status, said = child.status(), _text(log)
    last = _place.before(said)
    return f"ended its process (status {status})" + (f"; it said last: {last}" if last else "") + _place.stuck(said)


def _text(log: TextIO) -> str:
    log.seek(0)
    return log.read()


def _environment() -> dict[str, str]:
    """This process's, with its own module folders: a test runner or a script may have added some."""
    installed = (sys.prefix, sys.base_prefix)
    added = [os.path.abspath(path) for path in sys.path if not os.path.abspath(path).startswith(installed)]
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*added, *before]))}


class _Child:
    """The process that asks; it speaks JSON lines on a pipe of its own, and may print what it likes."""

    def __init__(self, target: str, checks: list[Check], limit_s: float, end: float, log: TextIO) -> None:
        self._read, write = os.pipe()
        self._pending = b""
        command = [sys.executable, "-m", "verl_fl.testing.conformance._child", str(write)]
        command += [str(limit_s), str(time.monotonic()), str(end), target, *(check.name for check in checks)]
        files: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[write])
        self._process = subprocess.Popen(command, env=_environment(), start_new_session=True, **files)
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
