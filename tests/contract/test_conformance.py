"""The kit finds nothing wrong with good platforms, and exactly what is wrong with each broken one."""

import json
import multiprocessing
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import mutants
import pytest

from verl_fl.testing.conformance import CHECKS, runner

MUTANTS_FILE = Path(__file__).with_name("mutants.py")
SIMX = "verl_fl.testing.simulated.vendors:SimX"
CPU = "verl_fl.platform.cpu:CPUPlatform"

pytestmark = pytest.mark.timeout(600)  # the first use of a simulated chip compiles it


LONG = [check.name for check in CHECKS.values() if check.processes or check.needs]


def test_the_cpu_passes_all():
    report = runner.run(CPU)
    assert [result for result in report.results if result.verdict == "failed"] == []
    assert (report.count("passed"), report.count("skipped")) == (len(CHECKS) - 4, 4)
    assert report.passed and not report.simulated


@pytest.mark.parametrize("name", ["SimX", "SimY"])  # the chip of examples/new_chip passes the long ones too: e2e
def test_a_simulated_chip_passes_and_one_without_bf16_does_as_well(name):
    report = runner.run(f"verl_fl.testing.simulated.vendors:{name}", skip=LONG)
    assert report.passed and report.simulated and report.count("skipped") == 0, report.to_table()


def test_every_check_has_a_mutant_and_a_reason():
    assert list(mutants.MUTANTS) == list(CHECKS)
    assert all(len(check.why) > 30 for check in CHECKS.values())


def _ask(name, all_checks):
    """The checks that the mutant fails; those that start processes of their own only where they are its own."""
    from verl_fl.testing import _target

    platform = _target.load(f"{MUTANTS_FILE}:{mutants.MUTANTS[name].__name__}")()
    asked = [c for c in CHECKS.values() if all_checks or c.name == name or not (c.processes or c.needs)]
    try:
        return [result.name for check in asked if (result := runner.answer(check, platform)).verdict == "failed"]
    finally:
        import torch

        torch.simx.set_fault()


@pytest.fixture(scope="module")
def elsewhere():
    """A process that may become a machine with a simulated chip."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda *arguments: pool.submit(*arguments).result(timeout=300)


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_mutant_fails_its_check_and_no_other(elsewhere, name):
    assert elsewhere(_ask, name, False) == [name]


@pytest.mark.slow
@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_mutant_passes_the_long_checks_of_others(elsewhere, name):
    assert elsewhere(_ask, name, True) == [name]


def test_a_probe_that_loads_its_sdk_is_caught():
    report = runner.run(f"{MUTANTS_FILE}:ProbeLoadsTheSdk", only=["probe"])
    assert "probe() loads the SDK" in report.results[0].message


BAD = """
import os, sys, time
print("noise " * 1000)
from verl_fl.testing.simulated.vendors import SimX
class Hangs(SimX):
    def synchronize(self, device_index=None): time.sleep(60)
class Exits(SimX):
    def manual_seed(self, seed): os._exit(3)
class Crashes(SimX):
    def manual_seed(self, seed): import ctypes; ctypes.string_at(0)
class Quits(SimX):
    def manual_seed(self, seed): sys.exit("no licence")
class WrongTypes(SimX):
    def device_count(self): return "two"
class NotAPlatform: pass
class Half(SimX):
    collective = ""
"""


@pytest.fixture
def bad(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(BAD)
    return lambda name: f"{file}:{name}"


@pytest.mark.parametrize(
    ("name", "check", "message"),
    [
        ("Hangs", "synchronize", "did not end in 5 s"),
        ("Exits", "rng-seed", "ended its process (status 3)"),
        ("Crashes", "rng-seed", "ended its process (status -11)"),
        ("Quits", "rng-seed", "SystemExit: no licence"),
        ("WrongTypes", "contract", "device_count() returns a str"),
    ],
)
def test_a_platform_that_misbehaves_fails_the_check_and_the_rest_go_on(bad, name, check, message):
    report = runner.run(bad(name), only=["features", "contract", "rng-seed", "synchronize"], timeout_s=5)
    failed = {result.name: result.message for result in report.results if result.verdict == "failed"}
    assert set(failed) == {check} and message in failed[check], report.to_table()
    assert len(report.results) == 4


@pytest.mark.parametrize(
    ("target", "messages"),
    [
        ("NotAPlatform", ["not a platform", "derived from verl_fl.platform.Platform"]),
        ("Half", ["platform Half is not complete", "missing: collective"]),
        ("Absent", ["has no Absent", "Hangs, Exits"]),
    ],
)
def test_what_is_no_platform_is_said_in_four_parts(bad, target, messages):
    with pytest.raises(runner.Unusable) as error:
        runner.run(bad(target))
    assert all(message in str(error.value) for message in messages), error.value


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise OSError('libchip.so: cannot open shared object file')", "OSError: libchip.so"),
        ("import sys; sys.exit(1)", "SystemExit"),
        ("import time; time.sleep(30)", "did not end in 2 s"),
        ("import os; os._exit(9)", "ended its process (status 9)"),
    ],
)
def test_a_module_that_can_not_be_imported_is_said(tmp_path, code, message):
    file = tmp_path / "vendor.py"
    file.write_text(code)
    start = time.monotonic()
    with pytest.raises(runner.Unusable) as error:
        runner.run(f"{file}:Chip", timeout_s=2 if "sleep" in code else 60)
    assert message in str(error.value) and str(file) in str(error.value)
    assert time.monotonic() - start < 15


def test_a_platform_without_a_device_is_said_and_nothing_is_asked(monkeypatch):
    monkeypatch.setenv("SIMX_VISIBLE_DEVICES", "")
    with pytest.raises(runner.Unusable, match="platform simx has no device that this process can use") as error:
        runner.run(SIMX)
    assert "SIMX_VISIBLE_DEVICES=" in str(error.value)


@pytest.mark.parametrize("target", ["no_such_module:X", "verl_fl.platform.cpu", ":X", "gone.py:X"])
def test_a_target_that_does_not_exist_is_said(target):
    with pytest.raises(runner.Unusable, match=r"asked: "):
        runner.run(target)


def _command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "verl_fl.testing.conformance", *map(str, arguments)], capture_output=True, text=True
    )


def test_the_command_writes_a_table_json_and_junit_and_says_it_with_its_status(tmp_path):
    good, junit = tmp_path / "report.json", tmp_path / "report.xml"
    done = _command(CPU, "--only", "uuid", "--only", "streams", "--json", good, "--junit", junit)
    assert done.returncode == 0 and f"{CPU}: 1 passed, 0 failed, 1 skipped" in done.stdout
    assert "skip  streams" in done.stdout and "the host is the device" in done.stdout
    assert json.loads(good.read_text())["passed"] is True
    suite = ElementTree.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "0", "1")

    broken = _command(f"{MUTANTS_FILE}:RayResource", "--only", "ray-resource", "--json", "-", "--junit", junit)
    assert broken.returncode == 1
    report = json.loads(broken.stdout)
    assert (report["passed"], report["results"][0]["verdict"]) == (False, "failed")
    assert "counts no devices" in ElementTree.parse(junit).getroot().find("testcase/failure").text

    unknown = _command(CPU, "--only", "no-such-check")
    assert unknown.returncode == 2 and "legal: names, contract" in unknown.stderr and "Traceback" not in unknown.stderr


def test_it_needs_nothing_but_torch():
    code = (
        "import sys\n"
        "for name in ('verl', 'ray', 'transformers', 'rich', 'typer', 'wrapt', 'omegaconf'): sys.modules[name] = None\n"
        "from verl_fl.testing.conformance import CHECKS, runner\n"
        "from verl_fl.platform.cpu import CPUPlatform\n"
        "results = [runner.answer(c, CPUPlatform()) for c in CHECKS.values() if not c.processes]\n"
        "failed = [r.name for r in results if r.verdict == 'failed']\n"
        "print(failed, [r.message for r in results if r.group == 'rollout'])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.startswith("[] ['needs transformers"), out.stdout + out.stderr
