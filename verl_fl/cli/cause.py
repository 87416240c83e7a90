"""Why did the run end? One exception message out of a log in which Ray repeats it through every layer."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_WORKER = re.compile(r"^\(([\w.: ()\[\]-]*?)(?:,? ?(?:pid|ip)=[^)]*)\) ?")
_HEAD = "Traceback (most recent call last):"
_EXCEPTION = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Died|Failed|Warning|Timeout))(?::\s?(.*))?$"
)
_END = ("The above exception", "During handling of", "Set the environment variable HYDRA", _HEAD)
_HYDRA = re.compile(
    r"^(Could not override|In '.*': Could not|Error merging override|Missing mandatory value|"
    r"Key '.*' is not in struct|no viable alternative|mismatched input|token recognition error)"
)
_LONGEST = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """What is shown of a failed run."""

    kind: str
    """The exception's type, or a word for what stands in for it."""
    message: str
    """Its whole message, without Ray's layers."""


def find(log: str) -> Cause:
    """Return the last true cause in ``log``: the driver's if it printed one, else a worker's, else the last lines."""
    log = _ANSI.sub("", log)
    driver, workers = _split(log.splitlines())
    for lines in (driver, workers):
        exceptions = _exceptions(lines)
        told = [cause for cause in exceptions if not _is_layer(cause)]
        if told:
            return told[-1]
        if lines is driver and (hydra := _hydra(lines)):
            return hydra
    said = [line for line in driver if line.strip()]
    return Cause(kind="no exception in the log", message="\n".join(said[-5:]) or "nothing was printed")


def _split(lines: list[str]) -> tuple[list[str], list[str]]:
    """Ray forwards workers' lines with a prefix ``(Name pid=1) ``; the rest is the driver's own."""
    driver, workers = [], []
    for line in lines:
        match = _WORKER.match(line)
        if match:
            workers.append(line[match.end() :])
        else:
            driver.append(line)
    return driver, workers


def _exceptions(lines: list[str]) -> list[Cause]:
    """Each ``Type: message`` that ends a traceback, in order, with the lines that belong to the message."""
    causes: list[Cause] = []
    inside, index = False, 0
    while index < len(lines):
        line = lines[index]
        if line.startswith("Exception ignored in"):  # printed while Python shuts down, after the true cause
            index = _skip_ignored(lines, index)
            continue
        inside = inside or line.startswith(_HEAD)
        match = _EXCEPTION.match(line)
        if not (inside and match):
            index += 1
            continue
        message = [match[2] or ""]
        index += 1
        while index < len(lines) and len(message) < _LONGEST and not _ends(lines[index]):
            message.append(lines[index])
            index += 1
        causes.append(Cause(kind=match[1].rpartition(".")[2], message="\n".join(message).strip()))
    return causes


def _skip_ignored(lines: list[str], index: int) -> int:
    """The index behind the exception that an ``Exception ignored in`` announces."""
    index += 1
    while index < len(lines) and (lines[index].startswith((" ", _HEAD))):
        index += 1
    return index + 1


def _ends(line: str) -> bool:
    return (
        not line.strip() or line.startswith(_END) or bool(_EXCEPTION.match(line)) or line.lstrip().startswith('File "')
    )


def _is_layer(cause: Cause) -> bool:
    """Whether this is only Ray carrying another exception: ``RayTaskError(ValueError): ray::Worker.step() (pid=1)``."""
    return cause.kind == "RayTaskError" or cause.message.startswith("ray::")


def _hydra(lines: list[str]) -> Cause | None:
    """Hydra prints a mistake in the config without a traceback."""
    for index, line in enumerate(lines):
        if _HYDRA.match(line):
            message = [line]
            for more in lines[index + 1 : index + 6]:
                if _ends(more):
                    break
                message.append(more)
            return Cause(kind="config", message="\n".join(message))
    return None
