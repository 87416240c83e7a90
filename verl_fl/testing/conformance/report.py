"""What a run of the kit found: as a table, as JSON, as JUnit XML."""

from __future__ import annotations

import json
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
    """Why it failed or was skipped; empty where it passed."""
    why: str
    """What goes wrong in a training where it fails."""
    group: str


@dataclass(kw_only=True, slots=True)
class Report:
    """A whole run."""

    target: str
    platform: dict[str, str] = field(default_factory=dict)
    """``name``, ``vendor``, ``device``, ``chip`` (the device's own name), ``devices``."""
    simulated: bool = False
    date: str = ""
    verl_fl: str = ""
    torch: str = ""
    python: str = ""
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
        data: dict[str, Any] = json.loads(text)
        if data.pop("schema", None) != SCHEMA:
            raise ValueError(f"not a conformance report of schema {SCHEMA}")
        data.pop("passed")
        return cls(**{**data, "results": [Result(**result) for result in data["results"]]})

    def to_junit(self) -> str:
        """JUnit's XML, as build servers read it."""
        suite = ElementTree.Element(
            "testsuite",
            name=f"verl-fl conformance of {self.target}",
            tests=str(len(self.results)),
            failures=str(self.count("failed")),
            skipped=str(self.count("skipped")),
            errors="0",
            time=f"{sum(result.seconds for result in self.results):.3f}",
        )
        for result in self.results:
            case = ElementTree.SubElement(
                suite, "testcase", classname=self.target, name=result.name, time=f"{result.seconds:.3f}"
            )
            if result.verdict != "passed":
                tag = "failure" if result.verdict == "failed" else "skipped"
                ElementTree.SubElement(case, tag, message=result.message.splitlines()[0]).text = result.message
        return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"

    def to_table(self) -> str:
        """For people: a line for each check, more for one that did not pass, and a summary."""
        width = max((len(result.name) for result in self.results), default=0)
        lines = [self.headline()] if self.platform else []
        for result in self.results:
            lines.append(f"{_MARKS[result.verdict]}  {result.name:<{width}}  {result.seconds:6.2f} s")
            if result.verdict == "skipped":
                lines[-1] += f"  {' '.join(result.message.split())}"
            elif result.verdict == "failed":
                lines += [f"      {line}" for line in result.message.splitlines()]
                lines.append(f"      why it matters: {result.why}")
        counts = ", ".join(f"{self.count(verdict)} {verdict}" for verdict in VERDICTS)
        return "\n".join([*lines, f"{self.target}: {counts}"])

    def headline(self) -> str:
        """The chip in a line."""
        about = self.platform
        kind = "simulated" if self.simulated else "real"
        return f"{about['name']} ({about['vendor']}), {about['devices']} x {about['chip']}, {kind}; torch {self.torch}"


_MARKS = {"passed": "ok  ", "failed": "FAIL", "skipped": "skip"}
