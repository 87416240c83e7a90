"""A fresh Python process for what happens once a process: reading a mask, importing an SDK."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from verl_fl.platform.base import Platform
from verl_fl.testing.conformance._check import Failed

_LIMIT_S = 60.0


def ask(platform: Platform, code: str, *, mask: str | None) -> Any:
    """Run ``code``, which sets ``answer`` from ``cls``, where the platform's mask is ``mask`` (None: unset).

    Raises:
        Failed: the process raised, ended or did not answer.
    """
    env = {name: value for name, value in os.environ.items() if name != platform.visible_devices_envvar()}
    if mask is not None:
        env[platform.visible_devices_envvar()] = mask
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        target = f"{origin(type(platform))}:{type(platform).__qualname__}"
        script = (
            "import json, sys\nfrom verl_fl.testing._target import load\n"
            f"cls = load({target!r})\n{code}\njson.dump(answer, open({file.name!r}, 'w'))\n"
        )
        command = [sys.executable, "-c", script]
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=_LIMIT_S, cwd=os.getcwd(), check=False
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"a fresh process with mask {mask!r} did not answer in {_LIMIT_S:g} s") from None
        if done.returncode != 0:
            raise Failed(
                f"a fresh process with mask {mask!r} ended with status {done.returncode}: {_said(done.stderr)}"
            )
        return json.loads(Path(file.name).read_text())


def _said(stderr: str) -> str:
    """The error that a traceback ends with, all its lines."""
    start = max(
        (match.start() for match in re.finditer(r"^[\w.]*(Error|Exception|Exit)\b", stderr, re.M)), default=None
    )
    return stderr[start:].strip() if start is not None else (stderr.strip().splitlines() or ["(it said nothing)"])[-1]


def origin(cls: type) -> str:
    """Where another process finds the class: its module, or its file where that is no module of a package."""
    module = sys.modules[cls.__module__]
    loaded_from_file = getattr(module, "__verl_fl_file__", None)
    return loaded_from_file or cls.__module__
