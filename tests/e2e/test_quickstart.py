"""quickstart against real verl and real Ray: a short run, one that fails, one that is interrupted and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(900)

SMALL = ["--batch", "4", "--samples", "2", "--response-length", "8"]


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "verl_fl.cli.main", "quickstart", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process, limit_s=600):
    output, _ = process.communicate(timeout=limit_s)
    return process.returncode, output


def commands_with(text: str) -> list[list[str]]:
    """Command lines of the live processes that mention ``text``, this test's own aside."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and any(text in part for part in process.info["cmdline"] or []):
            found.append(process.info["cmdline"])
    return found


def ray_dir(run_dir: Path) -> str:
    """The temporary directory of the run's Ray, out of the command that the log begins with."""
    log = (run_dir / "run.log").read_text(errors="replace")
    return log.partition("ray_init._temp_dir=")[2].split()[0].strip("'")


def assert_nothing_is_left(run_dir: Path) -> None:
    folder = ray_dir(run_dir)
    assert folder.startswith("/tmp/vfl")
    assert not os.path.exists(folder), f"Ray's files are still in {folder}"
    assert commands_with(folder) == [], "Ray's processes still run"
    assert commands_with(str(run_dir)) == [], "verl still runs"


def test_a_short_run_ends_cleanly_with_its_summary(tmp_path):
    out = tmp_path / "run"
    code, output = ended(start("--steps", 2, "--seed", 5, "--out", out, *SMALL, "trainer.project_name=mine"))
    assert code == 0, output
    assert "Traceback" not in output
    assert output.strip().splitlines()[-1] == str(out / "summary.json")
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary["seed"]) == (2, 5)
    assert 0 <= summary["reward_first"] <= 1 and summary["train_seconds"] > 0 and summary["tokens_per_second"] > 0
    for path in summary["paths"].values():
        assert os.path.exists(path), path
        assert path in output
    assert (out / "reward.png").stat().st_size > 1000
    assert "step   2/2" in output
    assert_nothing_is_left(out)


def test_a_run_that_fails_shows_the_cause_and_where_the_log_is(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    raise LookupError('label 17 is unknown')\n"
    )
    made = tmp_path / "made"
    from verl_fl.cli import toy

    toy.make_data(made / "t.parquet", tmp_path / "unused.py", 0)
    out = tmp_path / "run"
    code, output = ended(
        start(
            *("--train", made / "t.parquet", "--reward", reward, "--steps", 1, "--out", out),
            *SMALL,
            "fl.reward.on_error=raise",
        )
    )
    assert code == 1, output
    assert "the run failed before the first step" in output
    assert "label 17 is unknown" in output
    assert str(out / "run.log") in output
    assert "Traceback" not in output
    assert len(output.splitlines()) < 40, output
    assert_nothing_is_left(out)


def test_ctrl_c_leaves_nothing_behind_and_the_run_can_be_resumed(tmp_path):
    out = tmp_path / "run"
    process = start("--steps", 200, "--save-every", 1, "--out", out, *SMALL)
    try:
        checkpoint = out / "checkpoints" / "latest_checkpointed_iteration.txt"
        deadline = time.monotonic() + 400
        while not checkpoint.exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "no checkpoint in 400 s"
            time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        code, output = ended(process, limit_s=90)
    finally:
        process.kill()
    assert code == 130, output
    assert f"verl-fl quickstart --resume {out}" in output
    assert "Traceback" not in output
    assert_nothing_is_left(out)

    # verl may have saved once more between the signal and its end, so the folders tell, not the tracker alone.
    saved = max(int(folder.name.removeprefix("global_step_")) for folder in checkpoint.parent.glob("global_step_*"))
    code, output = ended(start("--resume", out, "--steps", saved + 1))
    assert code == 0, output
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == saved + 1
    assert f"step {saved + 1:3d}/{saved + 1}" in output
    assert f"step {saved - 1:3d}/" not in output, "a step before the last checkpoints was run again"
