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
from verl_fl.testing._target import spell
from verl_fl.testing.conformance import _limit, _place
from verl_fl.testing.conformance._check import Failed


def ask(platform: Platform, code: str, *, mask: str | None) -> Any:
    """Run ``code``, which sets ``answer`` from ``cls``, where the platform's mask is ``mask`` (None: unset).

    Raises:
        Failed: the process raised, ended or did not answer.
    """
    env = {name: value for name, value in os.environ.items() if name != platform.visible_devices_envvar()}
    if mask is not None:
        env[platform.visible_devices_envvar()] = mask
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        target, limit = spell(type(platform)), _limit.left()
        script = (
            f"import faulthandler\nfaulthandler.dump_traceback_later({limit * 0.9})\n"
            "import json, sys\nfrom verl_fl.testing._target import load\n"
            f"cls = load({target!r})\n{code}\njson.dump(answer, open({file.name!r}, 'w'))\n"
        )
        command = [sys.executable, "-c", script]
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, errors="replace", timeout=limit, cwd=os.getcwd(), check=False
            )
        except subprocess.TimeoutExpired as late:
            place = _place.stuck((late.stderr or b"").decode(errors="replace"))
            raise Failed(f"a fresh process with mask {mask!r} did not answer in {limit:.0f} s{place}") from None
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
