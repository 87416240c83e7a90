"""``python -m verl_fl.testing.conformance TARGET``: run the kit, print or write the report."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from verl_fl._errors import explain
from verl_fl.testing.conformance import CHECKS, runner
from verl_fl.testing.conformance.report import Report, Result


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="verl-fl conformance",
        description="Ask a platform everything that a training relies on, and say what holds, what does not and why.",
        epilog="Exit status: 0 all passed (skipped ones are counted), 1 a check failed, 2 the target can't be asked.",
    )
    made.add_argument("target", nargs="?", help="package.module:Class or path/to/file.py:Class; default: what is here")
    made.add_argument("--only", action="append", default=[], metavar="CHECK", help="run this check; may be repeated")
    made.add_argument("--skip", action="append", default=[], metavar="CHECK", help="leave this check out")
    made.add_argument("--json", metavar="FILE", help="write the report as JSON; - is standard output")
    made.add_argument("--junit", metavar="FILE", help="write the report as JUnit XML")
    made.add_argument("--timeout", type=float, default=120.0, metavar="S", help="limit of each check (default 120 s)")
    made.add_argument("--within", type=float, default=math.inf, metavar="S", help="limit of the whole run (none)")
    made.add_argument("--list", action="store_true", help="show the checks and why each is made")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run and report; returns the exit status."""
    options = parser().parse_args(arguments)
    if options.list:
        for check in CHECKS.values():
            print(f"{check.name}: {check.why}")
        return 0
    try:
        _need_folders(options.json, options.junit)
        report = runner.run(
            options.target or _detected(),
            only=options.only,
            skip=options.skip,
            timeout_s=options.timeout,
            within_s=options.within,
            tell=_progress(options.json),
        )
    except (runner.Unusable, ValueError) as error:
        print(f"verl-fl conformance: {error}", file=sys.stderr)
        return 2
    _write(report, options.json, options.junit)
    return 0 if report.passed else 1


def _need_folders(*files: str | None) -> None:
    """Minutes of checking are not lost to a wrong path.

    Raises:
        ValueError: one of the files lies in no folder.
    """
    for file in files:
        if file and not Path(file).absolute().parent.is_dir():
            raise ValueError(explain("the report can't be written: there is no such folder", asked=file))


def _detected() -> str:
    from verl_fl.platform.manager import detect, platform_classes

    found = detect()
    cls = platform_classes()[found.name]
    print(f"platform {found.name}: {found.reason}", file=sys.stderr)
    return f"{cls.__module__}:{cls.__qualname__}"


def _progress(json_file: str | None) -> Callable[[Result], None]:
    """Each check's verdict as it comes, where the table will not follow at once."""

    def tell(result: Result) -> None:
        print(f"{result.verdict:<8} {result.name} ({result.seconds:.1f} s)", file=sys.stderr, flush=True)

    return tell if json_file == "-" or sys.stderr.isatty() else lambda result: None


def _write(report: Report, json_file: str | None, junit_file: str | None) -> None:
    if json_file == "-":
        print(report.to_json())
    else:
        print(report.to_table())
        if json_file:
            Path(json_file).write_text(report.to_json() + "\n", encoding="utf-8")
    if junit_file:
        Path(junit_file).write_text(report.to_junit(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
