"""The targets of weight sync, judged by the ratios of one run, and the tables for people."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
GLOO_TARGETS = {"llama-2gb": 1.7}
RIVALS = ("gloo-per-tensor", "gloo-bucket", "ray", "zmq", "zmq-ipc", "nixl", "nixl-shm", "mooncake")
RIVALS_OVER_TCP = ("zmq", "nixl", "mooncake")


def check(
    name: str, target: float, ratio: float | None, holds: Callable[[float, float], bool] = operator.ge, **about: Any
) -> Row:
    """One target; neither true nor false where this run did not measure it."""
    sign = ">=" if holds is operator.ge else "<="
    rounded = None if ratio is None else round(ratio, 3)
    ok = None if ratio is None else holds(ratio, target)
    return {"check": name, **about, "target": f"{sign} {target:g}", "ratio": rounded, "ok": ok}


def of_rows(rows: list[Row]) -> list[Row]:
    """Every target that speeds on one host decide, for each payload of the run; missed where our method failed."""
    found = [row for payload in dict.fromkeys(row["payload"] for row in rows) for row in _of_payload(rows, payload)]
    failed = {(row["method"], row["payload"]): row["reason"] for row in rows if row["gbps"] is None}
    for row in found:
        ours = (row["check"].partition(":")[0].split()[0], row["payload"])
        if row["ratio"] is None and ours in failed:
            row.update(ok=False, reason=failed[ours])
    return found


def _of_payload(rows: list[Row], payload: str) -> list[Row]:
    speeds = {(row["method"], row["receivers"]): row["gbps"] for row in rows if row["payload"] == payload}
    memcpy = next((speed for (method, _), speed in speeds.items() if method == "memcpy"), None)

    def speed(method: str, receivers: int = 1) -> float | None:
        return speeds.get((method, receivers))

    def fastest(names: tuple[str, ...]) -> tuple[str, float | None]:
        known = {name: value for name in names if (value := speed(name))}
        name = max(known, key=lambda name: known[name], default="none")
        return name, known.get(name)

    over_tcp, over_tcp_speed = fastest(RIVALS_OVER_TCP)
    rival, rival_speed = fastest(RIVALS)
    tcp, shm, gloo = speed("fl-tcp"), speed("fl-shm"), speed("gloo-per-tensor")
    about: dict[str, Any] = {"payload": payload}
    return [
        check("fl-tcp / raw_tcp", 0.6, _ratio(tcp, speed("raw_tcp")), **about),
        check("fl-tcp / gloo-per-tensor", GLOO_TARGETS.get(payload, 2.5), _ratio(tcp, gloo), **about),
        check("fl-tcp / best rival over TCP", 1.3, _ratio(tcp, over_tcp_speed), **about, rival=over_tcp),
        check(
            "fl-tcp / gloo-per-tensor, 4 receivers",
            3.0,
            _ratio(speed("fl-tcp", 4), speed("gloo-per-tensor", 4)),
            **about,
        ),
        check("fl-shm / best rival", 1.3, _ratio(shm, rival_speed), **about, rival=rival),
        check("fl-shm / memcpy", 0.45, _ratio(shm, memcpy), **about),
        check("fl-shm: seconds to 4 receivers / to 1", 2.0, _ratio(shm, speed("fl-shm", 4)), operator.le, **about),
    ]


def of_links(results: list[Row]) -> list[Row]:
    """Every target over limited links."""
    targets = {
        "relay": ("seconds to 8 hosts / to 1", 1.3, operator.le),
        "senders": ("seconds of one sender / of two", 1.7, operator.ge),
        "delta": ("seconds of a full sync / of the first step's delta", 15.0, operator.ge),
    }
    found = []
    for result in results:
        name, target, holds = targets[result["scenario"]]
        row = check(f"{result['scenario']}: {name}", target, result["ratio"], holds, payload=result["payload"])
        found.append(row | {"ok": False, "reason": result["reason"]} if "reason" in result else row)
    return found


def _ratio(ours: float | None, other: float | None) -> float | None:
    return ours / other if ours and other else None


def print_tables(result: dict[str, Any]) -> None:
    """Speeds by method and number of receivers, scenarios over links, checks; to stderr."""
    rows = result.get("rows", [])
    for payload in dict.fromkeys(row["payload"] for row in rows):
        _print_speeds([row for row in rows if row["payload"] == payload], payload)
    for scenario in result.get("links", []):
        print("\n" + ", ".join(f"{key} {value}" for key, value in scenario.items()), file=sys.stderr)
    print(f"\n{'check':54} {'payload':10} {'target':>8} {'ratio':>8}", file=sys.stderr)
    for row in result["checks"]:
        name = row["check"] + (f" ({row['rival']})" if "rival" in row else "")
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        verdict = {True: "ok", False: "MISSED", None: "not measured"}[row["ok"]]
        print(f"{name:54} {row['payload']:10} {row['target']:>8} {ratio:>8}  {verdict}", file=sys.stderr)


def _print_speeds(rows: list[Row], payload: str) -> None:
    numbers = sorted({row["receivers"] for row in rows})
    print(f"\n{payload}, GB/s to each of N receivers", file=sys.stderr)
    print(f"{'method':16}" + "".join(f"{number:>9}" for number in numbers) + "  variant, or why not", file=sys.stderr)
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = {row["receivers"]: row for row in rows if row["method"] == method}
        speeds = [mine[number]["gbps"] if number in mine else None for number in numbers]
        cells = "".join(f"{'-':>9}" if speed is None else f"{speed:9.2f}" for speed in speeds)
        notes = dict.fromkeys(row.get("variant") or row.get("reason") for row in mine.values())
        print(f"{method:16}{cells}  {'; '.join(note for note in notes if note)}", file=sys.stderr)
