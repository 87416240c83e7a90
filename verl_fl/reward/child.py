"""The process that runs the user's reward function: ``python -m verl_fl.reward.child FD PATH NAME``.

It speaks pickle over the socket ``FD`` with the process that started it, and no other. Standard output stays the
user's. It imports what the function imports, and nothing of its own but the standard library.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

MAX_RESULT_BYTES = 16 * 2**20


class NoFunction(AttributeError):
    """The module has no such function; the message lists those it has."""


def load(path: str, name: str) -> Callable[..., Any]:
    """The function ``name`` of a file, or of a package path that starts with ``pkg://``.

    Raises:
        NoFunction: there is none of that name.
    """
    module = _module(path)
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise NoFunction(", ".join(names))
    return function


def _module(path: str) -> ModuleType:
    if path.startswith("pkg://"):
        return importlib.import_module(path.removeprefix("pkg://").replace("/", "."))
    file = Path(path.removeprefix("file://")).resolve()
    name = f"verl_fl_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    spec.loader.exec_module(module)
    return module


def normalise(result: Any) -> tuple[Any, str | None]:
    """``(score or dictionary with a finite score, None)``, or ``(None, reason)`` where ``result`` is no reward.

    A score may be a Python or NumPy number or a tensor of one element, and comes back as a float.
    """
    if isinstance(result, dict):
        if "score" not in result:
            return None, f"returned a dictionary without 'score' (keys: {', '.join(map(str, result)) or 'none'})"
        score, reason = normalise(result["score"])
        return (None, f"'score': {reason}") if reason else ({**result, "score": score}, None)
    if hasattr(result, "item") and getattr(result, "size", None) is not None:
        try:
            result = result.item()
        except (TypeError, ValueError, RuntimeError):
            return None, f"returned a {type(result).__name__} of more than one element"
    if result is None:
        return None, "returned None"
    if not isinstance(result, bool | int | float):
        return None, f"returned a {type(result).__name__}: {repr(result)[:80]}"
    return (float(result), None) if math.isfinite(result) else (None, f"returned {result}")


def describe(error: BaseException, file: str | None = None) -> str:
    """One line for ``error``: type, message, and where it was raised, in ``file`` if it passed there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file and Path(frame.filename).resolve() == Path(file).resolve()]
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in (own or frames)[-1:])
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def call(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], file: str | None = None) -> bytes:
    """Call it and pickle what :func:`normalise` makes of the result, or the reason why there is none."""
    try:
        value, reason = normalise(function(*args, **kwargs))
    except SystemExit as error:
        value, reason = None, f"called sys.exit({error.code!r})"
    except BaseException as error:
        value, reason = None, "raised " + describe(error, file)
    try:
        answer = pickle.dumps((value, reason), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return pickle.dumps((None, f"returned what can't be sent: {describe(error)}"))
    if len(answer) > MAX_RESULT_BYTES:
        size, most = len(answer) >> 20, MAX_RESULT_BYTES >> 20
        return pickle.dumps((None, f"returned {size} MB, and at most {most} are legal"))
    return answer


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(fd: int, path: str, name: str) -> None:
    """Load the function, say whether that worked, then answer calls until the socket closes."""
    # The other end may close at any moment, while the function loads too: a run that has ended, nobody's error.
    with Connection(fd) as connection, contextlib.suppress(EOFError, ConnectionError):
        _serve(connection, path, name)


def _serve(connection: Connection, path: str, name: str) -> None:
    sys.path.extend(entry for entry in connection.recv() if entry not in sys.path)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        function = load(path, name)
    except BaseException as error:
        connection.send((False, describe(error)))
        return
    connection.send((True, "coroutine" if inspect.iscoroutinefunction(function) else "function"))
    file = None if path.startswith("pkg://") else path.removeprefix("file://")
    while True:
        try:
            args, kwargs = connection.recv()
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            connection.send_bytes(pickle.dumps((None, f"could not be given its arguments: {describe(error)}")))
            continue
        connection.send_bytes(call(function, args, kwargs, file))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
