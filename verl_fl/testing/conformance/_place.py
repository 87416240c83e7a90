"""Where a platform's code was when it raised, hung or crashed: what its author looks for first."""

from __future__ import annotations

import re
import sysconfig
import traceback

_STACKS = re.compile(r"^(?:Timeout \(|Fatal Python error:)", re.M)
_THREAD = re.compile(r"^(?=Current thread |Thread )", re.M)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.M)
_STDLIB = sysconfig.get_path("stdlib")


def raised(error: BaseException) -> str:
    """A line that says where; the innermost place outside the kit, where there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "verl_fl/testing/conformance" not in frame.filename] or frames
    return f"\n  at: {own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else ""


def stuck(log: str) -> str:
    """The same from the stacks that ``faulthandler`` wrote last into a log, or nothing where it wrote none."""
    threads = _THREAD.split(_split(log)[1])
    crashed = [thread for thread in threads if thread.startswith("Current")]  # a hang has none: the main one is last
    found = _FRAME.findall((crashed or threads)[-1])
    frames = [(file, f"{file}:{line}, in {name}") for file, line, name in found]
    if not frames:
        return ""
    innermost = frames[0][1]
    caller = next((where for file, where in frames if not _library(file)), innermost)
    return f"\n  at: {innermost}" + (f", called from {caller}" if caller != innermost else "")


def before(log: str) -> str:
    """The last line that was said before the stacks, or nothing."""
    return (_split(log)[0].strip().splitlines() or [""])[-1]


def _split(log: str) -> tuple[str, str]:
    """What was said, and the last stacks."""
    start = max((match.start() for match in _STACKS.finditer(log)), default=len(log))
    return log[:start], log[start:]


def _library(file: str) -> bool:
    return "/site-packages/torch/" in file or "/dist-packages/torch/" in file or file.startswith(f"{_STDLIB}/")
