"""Weight sync from model to model between processes of one machine: ours, every rival, and the machine's own limits.

    python benchmarks/weight_sync.py [--payloads smollm2 llama-2gb] [--receivers 1 2 4] [--repeats 5] [--methods ...]
    python benchmarks/weight_sync.py --payload small --receivers 1 --repeats 2      # a smoke test, in seconds
    python benchmarks/weight_sync.py --links [--model DIR_OR_GGUF]                  # 1 Gbit/s links; needs root, ip, tc

A sync takes the sender's named tensors into the receivers' own named tensors, in other processes; connections and
buffers stay from one sync to the next. Seconds are from the sender's start to the last receiver's end, the median of
the repeats; the first sync of each method warms up and does not count. All methods take turns in the same processes.
Before each sync every value changes, and after it each receiver's digest must be the sender's; a method that fails has
a row with null and the reason. Where a method has variants (bucket sizes, streams), the best one counts.

Rivals that are missing: ``pip install pyzmq nixl nixl-cu12 mooncake-transfer-engine-non-cuda`` (the last one loads
libibverbs.so.1, of the system package libibverbs1, though it speaks TCP here).

The last line of stdout is one JSON object: ``rows`` of method, payload, receivers, ``gbps`` (payload bytes / seconds /
1e9; what each receiver gets, not their sum); ``raw_tcp_gbps`` and ``memcpy_gbps`` of the first payload with the fewest
receivers (the others are rows too); ``checks``: each target with the ratio measured in this run, and true or false.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import signal
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import _common
import _weight_sync_checks as checks
import _weight_sync_methods as methods
import _weight_sync_payloads as payloads
from _weight_sync_cluster import Cluster, MethodFailed, cluster, jobs_on_loopback
from _weight_sync_ray import own_ray

Row = dict[str, Any]
DEFAULT = [name for name in methods.METHODS if name != "fl"]
SCENARIOS = ["relay", "senders", "delta"]
PACKAGES = ("verl-fl", "torch", "ray", "pyzmq", "nixl", "mooncake-transfer-engine", "xxhash")
PACKAGES += ("mooncake-transfer-engine-non-cuda",)  # the same library under the name of its build without CUDA
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # of the benchmark's own Ray, for its own processes
    "NIXL_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
    "MC_LOG_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
}
"""For the processes of the benchmark: one secret for its Ray, libraries that speak of errors only."""


def why_not(names: list[str]) -> dict[str, str]:
    """For each method that cannot run here, the reason; each is tried in a process of its own, which it may crash."""
    context = multiprocessing.get_context("spawn")
    reasons = {}
    for name in names:
        ours, theirs = context.Pipe()
        process = context.Process(target=_try, args=(name, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            reason = ours.recv() if ours.poll(120) else "its import takes more than 120 s"
        except EOFError:
            process.join()
            reason = f"its import ends the process with {process.exitcode}"
        process.kill()
        process.join()
        if reason:
            reasons[name] = reason
    return reasons


def _try(name: str, pipe: Connection) -> None:
    pipe.send(methods.unavailable(name))


def one_round(processes: Cluster, wanted: list[str], seconds: dict[tuple[str, str], list[float]] | None) -> None:
    """One verified sync of each method and variant."""
    for method in wanted:
        for variant in methods.variants(method):
            if method != "raw_tcp":
                processes.change()
            taken = processes.sync(method, variant)
            if method != "raw_tcp":
                processes.verify(method)
            if seconds is not None:
                seconds.setdefault((method, variant), []).append(taken)


def too_large(payload: payloads.Payload, num_receivers: int, wanted: list[str]) -> str:
    """Why the machine's free memory does not do for a measurement; empty where it does."""
    import psutil

    models = 1 + num_receivers + 2 * ("ray" in wanted) + ("memcpy" in wanted)
    need = models * payload.size_bytes + (1 + num_receivers) * (400 << 20)
    free = psutil.virtual_memory().available
    return f"needs {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free" if need > 0.9 * free else ""


def measure(
    payload: payloads.Payload, num_receivers: int, wanted: list[str], repeats: int, timeout_s: float, ray_address: str
) -> list[Row]:
    """Rows of all methods for one payload and number of receivers; starts anew without a method that fails."""
    rows: dict[str, Row] = {}
    remaining = list(wanted)
    while remaining:
        seconds: dict[tuple[str, str], list[float]] = {}
        try:
            with cluster(jobs_on_loopback(payload, num_receivers, timeout_s, ray_address)) as processes:
                for method in remaining:
                    processes.open(method)
                for repeat in range(repeats + 1):
                    one_round(processes, remaining, seconds if repeat else None)
        except MethodFailed as failure:
            if failure.method not in remaining:
                raise
            print(f"== {failure}; going on without it", file=sys.stderr)
            remaining.remove(failure.method)
            rows[failure.method] = {"gbps": None, "reason": failure.reason}
            continue
        rows.update({method: best(method, seconds, payload.size_bytes) for method in remaining})
        break
    about = {"payload": payload.name, "receivers": num_receivers}
    return [{"method": method, **about, **rows[method]} for method in wanted]


def best(method: str, seconds: dict[tuple[str, str], list[float]], size_bytes: int) -> Row:
    """A method's row: the variant with the smallest median."""
    medians = {variant: statistics.median(times) for (name, variant), times in seconds.items() if name == method}
    variant = min(medians, key=lambda name: medians[name])
    row = {"gbps": round(size_bytes / medians[variant] / 1e9, 3), "seconds": round(medians[variant], 5)}
    spread = [round(size_bytes / time / 1e9, 3) for time in sorted(seconds[method, variant], reverse=True)]
    row["gbps_all"] = spread
    return {**row, "variant": variant} if variant else row


def loopback(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole table on this machine's loopback."""
    reasons = why_not(arguments.methods)
    for method, reason in reasons.items():
        print(f"== {method} cannot run here: {reason}", file=sys.stderr)
    wanted = [method for method in arguments.methods if method not in reasons]
    rows: list[Row] = []
    for name in arguments.payloads:
        payload = payloads.PAYLOADS[name]
        with own_ray(payload.size_bytes if "ray" in wanted else 0) as ray_address:
            for num_receivers in arguments.receivers:
                start = time.monotonic()
                here = [method for method in wanted if method != "memcpy" or num_receivers == arguments.receivers[0]]
                about = {"payload": name, "receivers": num_receivers, "gbps": None}
                if reason := too_large(payload, num_receivers, here):
                    print(f"== {name}, {num_receivers} receivers: {reason}", file=sys.stderr)
                    rows += [{"method": method, **about, "reason": reason} for method in here]
                else:
                    rows += measure(payload, num_receivers, here, arguments.repeats, arguments.timeout, ray_address)
                rows += [{"method": method, **about, "reason": reason} for method, reason in reasons.items()]
                print(f"== {name}, {num_receivers} receivers: {time.monotonic() - start:.0f} s", file=sys.stderr)

    def first(method: str) -> float | None:
        return next((row["gbps"] for row in rows if row["method"] == method), None)

    result = {"rows": rows, "raw_tcp_gbps": first("raw_tcp"), "memcpy_gbps": first("memcpy")}
    return {**result, "checks": checks.of_rows(rows)}


def links(arguments: argparse.Namespace) -> dict[str, Any]:
    """Relay, several senders, delta, over limited links."""
    import _weight_sync_links

    payload = payloads.PAYLOADS[arguments.payloads[0]]
    names = arguments.links or SCENARIOS
    limits = (arguments.repeats, arguments.timeout)
    found = list(_weight_sync_links.measure(names, payload, *limits, arguments.model, arguments.delta_steps))
    return {"links": found, "checks": checks.of_links(found)}


def parse() -> argparse.Namespace:
    """The command line, with its mistakes reported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--payloads",
        "--payload",
        nargs="+",
        choices=list(payloads.PAYLOADS),
        default=["smollm2", "llama-2gb"],
        metavar="NAME",
        help="smollm2 (269 MB), llama-2gb, small (0.9 MB, for smoke tests); --links takes the first (default: the "
        "first two)",
    )
    parser.add_argument("--receivers", nargs="+", type=int, default=[1, 2, 4], metavar="N", help="default 1 2 4")
    parser.add_argument("--repeats", type=int, default=5, help="syncs that count, of each method (default 5)")
    parser.add_argument(
        "--methods", nargs="+", choices=DEFAULT, default=DEFAULT, metavar="NAME", help=f"of {' '.join(DEFAULT)}"
    )
    parser.add_argument("--timeout", type=float, default=60, help="seconds that one step of a method may take")
    parser.add_argument(
        "--links",
        nargs="*",
        choices=SCENARIOS,
        metavar="NAME",
        help="instead: over 1 Gbit/s links between namespaces, of relay senders delta; all where none is named",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="DIR_OR_GGUF",
        help="with --links: SmolLM2-135M's weights for the delta sync (default: random ones)",
    )
    parser.add_argument("--delta-steps", type=int, default=5, help="with --links: AdamW steps (default 5)")
    arguments = parser.parse_args()
    for name, least in (("repeats", 1), ("delta_steps", 1), ("timeout", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be {least} or more")
    arguments.receivers = sorted(set(arguments.receivers))
    if min(arguments.receivers) < 1:
        parser.error(f"--receivers has {min(arguments.receivers)}; each number must be 1 or more")
    if arguments.model and arguments.links is None:
        parser.error("--model is for --links; the values of the other payloads do not matter")
    if arguments.links is not None:
        import _netns

        if reason := _netns.unavailable():
            parser.error(f"--links cannot run here: {reason}")
    return arguments


def main() -> None:
    """Measure, print the tables, print the JSON line."""
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and namespaces are taken down
    os.environ.update(ENVIRONMENT)
    load = os.getloadavg()[0]
    result = loopback(arguments) if arguments.links is None else links(arguments)
    checks.print_tables(result)
    _common.report({**result, "repeats": arguments.repeats, "machine": machine(), "load_before": load}, PACKAGES)


def machine() -> str:
    """Processor, cores, memory, kernel: what a ratio may depend on."""
    import platform

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return f"{model}, {os.cpu_count()} cores, {memory} GiB, {platform.system()} {platform.release()}"


if __name__ == "__main__":
    main()
