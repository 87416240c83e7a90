"""doctor's report as tables that read well at 100 columns."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_fl.cli.doctor import Report

_GIB = 1024**3


def show(report: Report, console: Console | None = None) -> None:
    """Print it; the verdict comes last."""
    console = console or Console()
    tables = [_packages(report)] if report.packages else []
    if any(plugin["error"] for plugin in report.plugins) or len(report.plugins) > 1:
        rows = {plugin["name"]: plugin["error"] or f"loaded: {plugin['module']}" for plugin in report.plugins}
        tables.append(_pairs("plugins of verl", rows))
    if report.platform:
        tables.append(_platform(report.platform))
    if report.registered:
        tables.append(
            _pairs(
                "registered with verl",
                {
                    name: "\n".join(rows) if name == "engines" else ", ".join(rows)
                    for name, rows in report.registered.items()
                },
            )
        )
    if report.patches:
        tables.append(_patches(report))
    if report.machine:
        tables.append(_pairs("machine", _machine(report.machine)))
    if report.missing:
        rows = {entry["package"]: f"needed only for {entry['for']}\n{entry['do']}" for entry in report.missing}
        tables.append(_pairs("not here", rows))
    for table in tables:
        console.print(table)
        console.print()
    for problem in report.problems:
        console.print(Text(f"problem: {problem}", style="red"))
    verdict = "healthy" if report.healthy else f"{len(report.problems)} problem(s)"
    console.print(Text(f"verl-fl {report.verl_fl}: {verdict}", style="bold green" if report.healthy else "bold red"))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _packages(report: Report) -> Table:
    table = _table("versions", "package", "installed", "tested", "")
    for row in report.packages:
        style = "" if row["ok"] else "yellow"
        table.add_row(row["name"], row["version"] or "-", row["tested"], Text(row["note"] or "ok", style=style))
    return table


def _platform(platform: dict[str, Any]) -> Table:
    table = _table(f"platform: {platform['name']} ({platform['reason']})", "probe", "here", "reason")
    for name, probe in platform["probes"].items():
        table.add_row(name, "yes" if probe["found"] else "no", Text(probe["reason"]))
    library = platform["flagcx"]
    use = "of every group" if library["requested"] else "between vendors"
    table.add_row("FlagCX", "yes" if library["found"] else "no", Text(f"{library['reason']} (backend {use})"))
    return table


def _patches(report: Report) -> Table:
    table = _table("patches of verl in memory", "name", "state", "target and why")
    for patch in report.patches:
        what = Text(f"{patch['target']}\n{patch['why']}" + (f"\n{patch['note']}" if patch["note"] else ""))
        table.add_row(patch["name"], patch["state"], what)
    return table


def _pairs(title: str, rows: dict[str, str]) -> Table:
    table = _table(title, "", "")
    table.show_header = False
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _machine(machine: dict[str, Any]) -> dict[str, str]:
    """Bytes as GiB, and the unit out of the name."""
    rows = {}
    for name, value in machine.items():
        shown = "unknown" if value is None else f"{value / _GIB:.1f} GiB" if name.endswith("_bytes") else str(value)
        rows[name.removesuffix("_bytes").replace("_", " ")] = shown
    return rows
