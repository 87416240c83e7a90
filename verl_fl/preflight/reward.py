"""The user's reward function: its file is there, imports, and has the function. Tried in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from verl_fl._errors import explain
from verl_fl._settings import select

_NODE = "reward.custom_reward_function"
_LIMIT_S = 120.0

# Prints one word on success; anything else is the reason. The module is loaded as verl loads it.
_PROBE = """
import sys
from verl_fl.reward import child
try:
    child.load(sys.argv[1], sys.argv[2])
except child.NoFunction as error:
    print("names:" + str(error))
else:
    print("ok:")
"""


def check_reward(config: Any) -> None:
    """Check ``reward.custom_reward_function``; without one, do nothing.

    Raises:
        ValueError: no such file or function, an import that fails, or one that does not end.
    """
    path, name = select(config, f"{_NODE}.path"), select(config, f"{_NODE}.name", "compute_score")
    path = path or select(config, "custom_reward_function.path")
    if not path:
        return
    file = str(path).removeprefix("file://")
    if not file.startswith("pkg://") and not Path(file).is_file():
        raise ValueError(
            explain(
                "the reward function's file does not exist",
                asked=f"{_NODE}.path={path}",
                found=f"nothing at {Path(file).absolute()}",
                fix=f"correct {_NODE}.path",
            )
        )
    _import(str(path), str(name))


def _import(path: str, name: str) -> None:
    command = [sys.executable, "-c", _PROBE, path, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ValueError(
            explain(
                f"importing the reward function did not end within {_LIMIT_S:g} s",
                asked=f"{_NODE}.path={path}",
                fix="move the work at its top level into the function",
            )
        ) from None
    answer = done.stdout.strip().rpartition("\n")[2]
    if answer.startswith("names:"):
        raise ValueError(
            explain(
                f"the reward file has no function {name!r}",
                asked=f"{_NODE}.name={name} in {path}",
                found=f"it defines {answer.removeprefix('names:') or 'no function'}",
                fix=f"set {_NODE}.name to one of them",
            )
        )
    if not answer.startswith("ok:"):
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}, with no message"]
        raise ValueError(
            explain(
                "the reward function's file can't be imported",
                asked=f"{_NODE}.path={path}",
                found="\n    ".join(lines[-6:]),
                fix=f"make `python {path.removeprefix('file://')}` run without an error",
            )
        )
