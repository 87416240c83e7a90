"""What the platform layer costs: a call through it beside torch's own call, and detection in a fresh process.

    python benchmarks/platform_cost.py [--repeats N] [--device simx]

The last line of stdout is one JSON object: ``extra_us`` is microseconds a call more than torch's own call costs, for
each method; ``detect_s`` seconds of detection, the interpreter's start included.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import _common

CALLS = 20_000
DETECT = "import sys; from verl_fl.platform import detect; detect(); assert 'torch' not in sys.modules"


def microseconds(function: Callable[[], Any]) -> float:
    """Of one call, the mean over many."""
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    return (time.perf_counter() - start) / CALLS * 1e6


def extra(platform: Any, name: str, repeats: int) -> float:
    """Microseconds that the platform's method costs more than the module's; the median of interleaved repeats."""
    ours, direct = getattr(platform, name), getattr(platform.device_module, name)
    return round(statistics.median(microseconds(ours) - microseconds(direct) for _ in range(repeats)), 3)


def detect_seconds(repeats: int) -> float:
    """Of a fresh process that detects and ends; the median."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", DETECT], check=True)
        times.append(time.perf_counter() - start)
    return round(statistics.median(times), 3)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11, help="of each measurement (default 11)")
    parser.add_argument("--device", choices=["detected", "simx"], default="detected", help="which platform to call")
    arguments = parser.parse_args()

    if arguments.device == "simx":
        from verl_fl.testing.simulated.vendors import SimX

        platform: Any = SimX()
    else:
        from verl_fl.platform import get

        platform = get()
    methods = ["current_device", "device_count", "is_available", "synchronize"]
    result = {
        "platform": platform.name,
        "extra_us": {name: extra(platform, name, arguments.repeats) for name in methods},
        "detect_s": detect_seconds(arguments.repeats),
        "repeats": arguments.repeats,
    }
    _common.report(result, ("verl-fl", "torch"))


if __name__ == "__main__":
    main()
