"""What a run of the kit found: as a table, as JSON, as JUnit XML."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any
from xml.etree import ElementTree

SCHEMA = 1

VERDICTS = ("passed", "failed", "skipped")


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One check's outcome."""

    name: str
    verdict: str
    """``passed``, ``failed`` or ``skipped``."""
    seconds: float
    message: str
    """Why it failed or was skipped; of a pass, what it rests on where that is less than it might be."""
    why: str
    """What goes wrong in a training where it fails."""
    group: str


@dataclass(kw_only=True, slots=True)
class Report:
    """A whole run."""

    target: str
    platform: dict[str, str] = field(default_factory=dict)
    """``name``, ``vendor``, ``device``, ``chip`` (the device's own name), ``devices``, ``memory`` in bytes, ``sdk``,
    ``torch_build``."""
    simulated: bool = False
    date: str = ""
    verl_fl: str = ""
    torch: str = ""
    python: str = ""
    machine: str = ""
    """Operating system, processor and cores."""
    results: list[Result] = field(default_factory=list)

    def count(self, verdict: str) -> int:
        """How many checks ended so."""
        return sum(result.verdict == verdict for result in self.results)

    @property
    def passed(self) -> bool:
        """Whether nothing failed and something was asked."""
        return bool(self.results) and self.count("failed") == 0

    def to_json(self) -> str:
        """One object; ``schema`` says which form."""
        return json.dumps({"schema": SCHEMA, **asdict(self), "passed": self.passed}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that :meth:`to_json` wrote.

        Raises:
            ValueError: it is of another schema.
        """
        data: Any = json.loads(text)
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise ValueError(f"not a conformance report of schema {SCHEMA}")
        data.pop("passed", None)
        return cls(**{**data, "results": [Result(**result) for result in data["results"]]})

    def to_junit(self) -> str:
        """JUnit's XML, as build servers read it."""
        suite = ElementTree.Element(
            "testsuite",
            name=f"verl-fl conformance of {_printable(self.target)}",
            tests=str(len(self.results)),
            failures=str(self.count("failed")),
            skipped=str(self.count("skipped")),
            errors="0",
            time=f"{sum(result.seconds for result in self.results):.3f}",
        )
        for result in self.results:
            case = ElementTree.SubElement(
                suite, "testcase", classname=_printable(self.target), name=result.name, time=f"{result.seconds:.3f}"
            )
            if result.verdict != "passed":
                tag = "failure" if result.verdict == "failed" else "skipped"
                message = _printable(result.message) or "no reason was given"
                text = f"{message}\nwhy it matters: {result.why}" if tag == "failure" else message
                ElementTree.SubElement(case, tag, message=message.splitlines()[0]).text = text
        return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"

    def to_table(self) -> str:
        """For people: a line for each check, more for one that did not pass, and a summary."""
        width = max((len(result.name) for result in self.results), default=0)
        lines = [self.headline()] if self.platform else []
        for result in self.results:
            lines.append(f"{_MARKS[result.verdict]}  {result.name:<{width}}  {result.seconds:6.2f} s")
            if result.verdict != "failed" and result.message:
                lines[-1] += f"  {' '.join(_printable(result.message).split())}"
            elif result.verdict == "failed":
                lines += [f"      {line}" for line in _printable(result.message).splitlines()]
                lines.append(f"      why it matters: {result.why}")
        counts = ", ".join(f"{self.count(verdict)} {verdict}" for verdict in VERDICTS)
        return "\n".join([*lines, f"{self.target}: {counts}"])

    def headline(self) -> str:
        """The chip in a line."""
        about = self.platform
        kind = "simulated" if self.simulated else "real"
        return f"{about['name']} ({about['vendor']}), {about['devices']} x {about['chip']}, {kind}; torch {self.torch}"


def _printable(text: str) -> str:
    """Without what XML forbids and a terminal would obey: a driver's message may hold anything."""
    return re.sub(r"[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\N{REPLACEMENT CHARACTER}", text)


_MARKS = {"passed": "ok  ", "failed": "FAIL", "skipped": "skip"}
