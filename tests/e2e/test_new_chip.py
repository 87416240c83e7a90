"""A chip that only a separate package knows: stock verl trains on it, unchanged, with its own Ray resource."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

EXAMPLE = Path(__file__).parents[2] / "examples" / "new_chip"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The example, installed into a folder of its own: in the environment it would be every test's platform."""
    source, target = tmp_path_factory.mktemp("source") / "new_chip", tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, source)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*install, str(target), str(source)], check=True)
    return {**os.environ, "PYTHONPATH": str(target), "HF_HUB_OFFLINE": "1"}


def test_it_is_detected_by_its_package_and_doctor_says_so(package):
    out = subprocess.run(
        [sys.executable, "-m", "verl_fl.cli.main", "doctor", "--json"], env=package, capture_output=True, text=True
    )
    report = json.loads(out.stdout)
    assert report["platform"]["name"] == "newchip" and report["healthy"], report["problems"]
    assert report["platform"]["probes"]["newchip"]["reason"] == "package new_chip.torch_newchip is installed"
    assert any("newchip/example" in row for row in report["registered"]["engines"])


def test_its_own_test_suite_passes_with_nothing_changed_here(package):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=EXAMPLE,
        env=package,
        capture_output=True,
        text=True,
    )
    assert "27 passed" in done.stdout, done.stdout[-3000:]


def test_a_vendors_package_that_raises_is_reported_and_stops_nobody(package, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(package["PYTHONPATH"], broken)
    (broken / "new_chip" / "__init__.py").write_text("print('hello')\nraise OSError('libnewchip.so: not found')\n")
    out = subprocess.run(
        [sys.executable, "-m", "verl_fl.cli.main", "doctor", "--json"],
        env={**package, "PYTHONPATH": str(broken)},
        capture_output=True,
        text=True,
    )
    report = json.loads(out.stdout)
    assert (out.returncode, report["platform"]["name"]) == (1, "cpu")
    assert any("plugin new_chip: OSError: libnewchip.so: not found" in problem for problem in report["problems"])


def test_grpo_trains_on_two_of_its_devices(package, training_run):
    run = training_run(env={**package, "VERL_PLATFORM": "NewChip"})
    steps = run.steps(
        "fl.platform=newchip",
        "trainer.device=newchip",
        "trainer.n_gpus_per_node=2",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.dtype=float32",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    )
    assert steps[2]["training/rollout_log_probs_diff/max"] < 1e-4
    assert steps[2]["actor/grad_norm"] > 0
