"""A few long-lived child processes that run a reward function under a limit, replaced when they break."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection
from typing import Any

from verl_fl._errors import explain

LOAD_LIMIT_S = 120.0
_POOLS: weakref.WeakSet[RewardPool] = weakref.WeakSet()


class LoadFailed(RuntimeError):
    """The function could not be loaded in its process; the message says why."""


class _Child:
    """One process; started at the first call and again after each kill."""

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name
        self.kind = ""
        self._process: subprocess.Popen | None = None
        self._socket: Connection | None = None

    def start(self) -> None:
        """Start it and wait until the function is loaded. Does nothing while it runs.

        Raises:
            LoadFailed: the import raised, or took longer than ``LOAD_LIMIT_S``.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "verl_fl.reward.child", str(theirs.fileno()), self.path, self.name]
        # A session of its own, so that a kill also reaches what the function started.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()
        self._socket = Connection(ours.detach())
        try:
            self._socket.send(list(sys.path))
            loaded, text = self._socket.recv() if self._socket.poll(LOAD_LIMIT_S) else (False, "import did not end")
        except (EOFError, OSError):
            loaded, text = False, f"its process ended at import {self._status()}"
        if not loaded:
            self.kill()
            raise LoadFailed(text)
        self.kind = text

    def call(self, payload: bytes, timeout_s: float) -> tuple[Any, str | None]:
        """``(value, None)`` or ``(None, reason)``; never takes longer than loading plus ``timeout_s``."""
        try:
            self.start()
        except LoadFailed as error:
            return None, f"could not be loaded: {error}"
        assert self._socket is not None
        try:
            self._socket.send_bytes(payload)
            if not self._socket.poll(timeout_s):
                self.kill()
                return None, f"took longer than {timeout_s:g} s"
            return pickle.loads(self._socket.recv_bytes())
        except (EOFError, OSError):
            reason = f"ended its process {self._status()}"
            self.kill()
            return None, reason
        except Exception as error:  # what came back names a class that only the child knows
            return None, f"returned what can't be read here: {type(error).__name__}: {error}"

    def _status(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return f"(exit status {self._process.returncode})"

    def kill(self) -> None:
        """End the process and all it started. Idempotent."""
        process, self._process = self._process, None
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class RewardPool:
    """Calls a function by its path in ``size`` processes; safe from any thread. Ends them at exit."""

    def __init__(self, path: str, name: str, *, timeout_s: float, size: int = 2) -> None:
        self.path, self.name, self.timeout_s = path, name, timeout_s
        self._children = [_Child(path, name) for _ in range(size)]
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        for child in reversed(self._children):
            self._idle.put(child)
        _POOLS.add(self)

    def kind(self) -> str:
        """``function`` or ``coroutine``. Starts a process.

        Raises:
            ValueError: the function can't be loaded; with the cause.
        """
        child = self._idle.get()
        try:
            child.start()
            return child.kind
        except LoadFailed as error:
            raise ValueError(
                explain(
                    "the reward function can't be loaded",
                    asked=f"reward.custom_reward_function: {self.name} of {self.path}",
                    found=str(error),
                )
            ) from error
        finally:
            self._idle.put(child)

    def call(self, *args: Any, **kwargs: Any) -> tuple[Any, str | None]:
        """``(score or dictionary with a score, None)``, or ``(None, reason)``; blocks until a process is free."""
        try:
            payload = pickle.dumps((args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            return None, f"could not be given its arguments: {type(error).__name__}: {error}"
        child = self._idle.get()
        try:
            return child.call(payload, self.timeout_s)
        finally:
            self._idle.put(child)

    def pids(self) -> list[int]:
        """Processes that run now."""
        return [child._process.pid for child in self._children if child._process is not None]

    def close(self) -> None:
        """End every process. A later call starts them again."""
        for child in self._children:
            child.kill()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@atexit.register
def _close_all() -> None:
    for pool in list(_POOLS):
        pool.close()
