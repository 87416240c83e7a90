"""``verl-fl doctor --audit``: every vendor-specific place in the installed verl, by what becomes of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_fl.patches import audit

_TITLES = {
    "routed": "routed: goes through the platform",
    "harmless": "harmless: another vendor's run is not affected",
    "open": "open: breaks something",
}


def run(as_json: bool) -> int:
    """Print the audit; return 0 where every place is judged, else 1."""
    result = audit.run()
    if as_json:
        print(json.dumps(_report(result), indent=1))
    else:
        show(result, Console())
    return 0 if result.complete else 1


def _report(result: audit.Audit) -> dict:
    """``unjudged`` has the form of verdicts.json: fill in the verdicts and paste it there."""
    judgements = {judgement: None for _, judgement in result.judged}
    unjudged = [
        {"file": file, "verdict": "", "why": "", "places": [place.key for place in places]}
        for file, places in groupby(result.unjudged, lambda place: place.file)
    ]
    return {
        "verl": version("verl"),
        "complete": result.complete,
        "counts": result.counts(),
        "judgements": [asdict(judgement) for judgement in judgements],
        "unjudged": unjudged,
        "stale": [{"file": file, "place": key} for file, key in result.stale],
    }


def show(result: audit.Audit, console: Console) -> None:
    """Print it; what needs a person comes last."""
    counts = result.counts()
    for verdict, title in _TITLES.items():
        if counts[verdict]:
            console.print(_judged(result, verdict, f"{title} ({counts[verdict]})"))
            console.print()
    for place in result.unjudged:
        where = f"{place.file}:{place.line} in {place.scope or 'the module'}"
        console.print(Text(f"not judged: {where} [{place.kind}] {place.text}", style="red"))
    for file, key in result.stale:
        console.print(Text(f"judged, but gone: {file}: {key}", style="red"))
    total = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    verdict = "every place is judged" if result.complete else "verl_fl/patches/verdicts.json does not fit this verl"
    console.print(
        Text(f"verl {version('verl')}: {total}; {verdict}", style="bold green" if result.complete else "bold red")
    )


def _judged(result: audit.Audit, verdict: str, title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="", box=None, pad_edge=False)
    table.add_column("where in verl", overflow="fold", max_width=44)
    table.add_column("why", overflow="fold")
    lines: dict[audit.Judgement, set[int]] = {}
    for place, judgement in result.judged:
        if judgement.verdict == verdict:
            lines.setdefault(judgement, set()).add(place.line)
    for judgement, found in lines.items():
        via = f" ({', '.join(judgement.by)})" if judgement.by else ""
        table.add_row(f"{judgement.file} {','.join(map(str, sorted(found)))}", Text(judgement.why + via))
    return table
