"""What one waits for before anything happens: importing the package, asking for help, a first training step.

    python benchmarks/startup.py [--skip-first-step] [--repeats N]

The last line of stdout is one JSON object. Times are wall-clock seconds; the import's is what it adds to a bare
interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def seconds(command: list[str]) -> float:
    """Run ``command`` and return how long it took."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return time.perf_counter() - start


def median_seconds(command: list[str], repeats: int) -> float:
    """The median of ``repeats`` runs, after one that fills the disk cache."""
    seconds(command)
    return statistics.median(seconds(command) for _ in range(repeats))


def first_step_seconds() -> float:
    """From the start of quickstart to the moment verl has written its first step's metrics."""
    with tempfile.TemporaryDirectory(prefix="vfl-bench-") as folder:
        out = Path(folder) / "run"
        metrics = out / "metrics-1.jsonl"
        command = [sys.executable, "-m", "verl_fl.cli.main", "quickstart", "--steps", "1", "--save-every", "0"]
        start = time.perf_counter()
        with subprocess.Popen([*command, "--out", str(out)], stdout=sys.stderr) as process:
            while not (metrics.is_file() and b"\n" in metrics.read_bytes()):
                if process.poll() is not None:
                    raise SystemExit(f"quickstart ended with {process.returncode} before its first step")
                time.sleep(0.05)
            taken = time.perf_counter() - start
        return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skip-first-step", action="store_true", help="only import and help")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each short measurement (default 7)")
    arguments = parser.parse_args()

    bare_s = median_seconds([sys.executable, "-c", "pass"], arguments.repeats)
    import_s = median_seconds([sys.executable, "-c", "import verl_fl"], arguments.repeats)
    script = Path(sys.executable).with_name("verl-fl")
    help_command = [str(script)] if script.exists() else [sys.executable, "-m", "verl_fl.cli.main"]
    help_s = median_seconds([*help_command, "--help"], arguments.repeats)

    from verl_fl.cli.summary import versions

    result = {
        "import_s": round(max(import_s - bare_s, 0.0), 4),
        "interpreter_s": round(bare_s, 4),
        "help_s": round(help_s, 4),
        "first_step_s": None if arguments.skip_first_step else round(first_step_seconds(), 1),
        "repeats": arguments.repeats,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "versions": versions(),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
