"""verl in a process group of its own, with a Ray of its own; whatever happens, nothing of it is left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import psutil

MARKER = "VERL_FL_RUN"
"""Set in the environment of a run's every process, so that they are found by it however they were started."""

_GRACE_S = 20.0


class Child:
    """One run of verl. Use as a context manager: leaving it ends all of the run's processes and removes Ray's files."""

    def __init__(self, run_dir: Path, metrics: Path) -> None:
        self.log = run_dir / "run.log"
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        self.mark = uuid.uuid4().hex
        # Ray puts sockets below it, and a socket's path may have no more than about 100 characters.
        self.ray_dir = tempfile.mkdtemp(prefix="vfl", dir="/tmp" if os.path.isdir("/tmp") else None)
        self.temporary = os.path.join(self.ray_dir, "tmp")
        os.mkdir(self.temporary)
        self._run_dir = run_dir
        self._metrics = metrics
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.sweep()
        shutil.rmtree(self.ray_dir, ignore_errors=True)

    def start(self, command: list[str]) -> None:
        """Start it; stdout and stderr are appended to :attr:`log`."""
        environment = dict(os.environ)
        for name in ("RAY_ADDRESS", "RAY_TMPDIR"):  # this run's Ray is its own
            environment.pop(name, None)
        environment |= {
            "VERL_FILE_LOGGER_PATH": str(self._metrics),
            "TMPDIR": self.temporary,  # verl leaves lock files there
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "RAY_USAGE_STATS_ENABLED": environment.get("RAY_USAGE_STATS_ENABLED", "0"),
            # Ray starts workers at niceness 15; the user waits for this run, so it takes its normal share.
            "RAY_worker_niceness": environment.get("RAY_worker_niceness", "0"),
            MARKER: self.mark,
        }
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def interrupt(self) -> None:
        """Ask it to end as Ctrl-C would, and give it time; what still runs is ended by :meth:`sweep`."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)

    def sweep(self) -> list[int]:
        """End every process that carries the mark: SIGTERM, then SIGKILL. Return their ids; idempotent."""
        found: list[int] = []
        for stop, patience_s in (
            (psutil.Process.terminate, 5.0),
            (psutil.Process.kill, 5.0),
            (psutil.Process.kill, 5.0),
        ):
            processes = marked(self.mark)
            if not processes:
                break
            found += [process.pid for process in processes if process.pid not in found]
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    stop(process)
            _wait(self.mark, patience_s)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
        return found

    def keep_ray_logs(self) -> Path | None:
        """Copy Ray's own logs into the run folder, since they go with its temporary directory; None: there are none."""
        source = Path(self.ray_dir) / "session_latest" / "logs"
        target = self._run_dir / "ray-logs"
        if not source.is_dir():
            return None
        shutil.copytree(source, target, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        return target


def marked(mark: str) -> list[psutil.Process]:
    """The live processes whose environment has ``VERL_FL_RUN=mark``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARKER) == mark:
                found.append(process)
    return [process for process in found if _alive(process)]


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _wait(mark: str, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and marked(mark):
        time.sleep(0.1)
