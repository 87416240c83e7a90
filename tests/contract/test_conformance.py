"""The kit finds nothing wrong with good platforms, and exactly what is wrong with each broken one."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import mutants
import pytest

from verl_fl.testing import _target
from verl_fl.testing.conformance import CHECKS, __main__, runner
from verl_fl.testing.conformance.report import Report

MUTANTS_FILE = Path(__file__).with_name("mutants.py")
DEVICE_CHECK = Path(__file__).parents[2] / "scripts" / "device_check.sh"
SIMX = "verl_fl.testing.simulated.vendors:SimX"
CPU = "verl_fl.platform.cpu:CPUPlatform"

pytestmark = pytest.mark.timeout(600)  # the first use of a simulated chip compiles it


LONG = [check.name for check in CHECKS.values() if check.processes or check.needs]


@pytest.mark.parametrize("name", ["SimX", "SimY"])  # the chip of examples/new_chip passes the long ones too: e2e
def test_a_simulated_chip_passes_and_one_without_bf16_does_as_well(name):
    report = runner.run(f"verl_fl.testing.simulated.vendors:{name}", skip=LONG)
    assert report.passed and report.simulated and report.count("skipped") == 0, report.to_table()


def test_every_check_has_a_mutant_and_a_reason():
    assert list(mutants.MUTANTS) == list(CHECKS)
    assert all(len(check.why) > 30 for check in CHECKS.values())


def _ask(class_name, asked):
    """The checks that the mutant fails, with what they say."""
    platform = _target.load(f"{MUTANTS_FILE}:{class_name}")()
    try:
        results = [runner.answer(CHECKS[name], platform) for name in asked]
        return {result.name: result.message for result in results if result.verdict == "failed"}
    finally:
        import torch

        torch.simx.set_fault()


def _workers(count):
    """Processes that may become a machine with a simulated chip."""
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


@pytest.fixture(scope="module")
def elsewhere():
    with _workers(1) as pool:
        yield lambda *arguments: pool.submit(*arguments).result(timeout=300)


PLANTED = {mutant.__name__: check for check, classes in mutants.MUTANTS.items() for mutant in classes}


@pytest.mark.parametrize("mutant", PLANTED)
def test_a_mutant_fails_its_check_and_no_other(elsewhere, mutant):
    own = PLANTED[mutant]
    failed = elsewhere(_ask, mutant, [name for name in CHECKS if name == own or name not in LONG])
    assert list(failed) == [own], failed
    assert "\n  do: " in failed[own] or "\n  at: " in failed[own], f"what to fix is not said: {failed[own]}"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_mutant_passes_the_long_checks_of_others():
    with _workers(2) as pool:
        runs = {name: pool.submit(_ask, name, list(CHECKS)) for name in PLANTED}
        failed = {name: list(run.result(timeout=2400)) for name, run in runs.items()}
    assert failed == {name: [check] for name, check in PLANTED.items()}


BAD = """
import os, sys, time
print("noise " * 1000)
from verl_fl.testing.simulated.vendors import SimX
class Hangs(SimX):
    def synchronize(self, device_index=None): time.sleep(60)
class Crashes(SimX):
    def manual_seed(self, seed): import ctypes; ctypes.string_at(0)
class Quits(SimX):
    def manual_seed(self, seed): sys.exit("no licence")
class WrongTypes(SimX):
    def device_count(self): return "two"
class NotAPlatform: pass
class Half(SimX):
    collective = ""
class Stuck(SimX):
    def device_count(self): time.sleep(60)
class Raises(SimX):
    def device_count(self): raise KeyError("x")
class NoDriver(SimX):
    sdk = "no_driver"
class Lost(SimX):
    def manual_seed(self, seed):
        open(__file__ + ".lost", "w")
        os.write(2, b"\\xff\\xfe\\x00 driver panic\\n")
        os._exit(3)
    def device_count(self): return 0 if os.path.exists(__file__ + ".lost") else super().device_count()
class StuckRank(SimX):
    def set_device(self, index): time.sleep(60 * (sys.argv[0] == "-c" and index == 1)); super().set_device(index)
class DeadRank(SimX):
    def set_device(self, index):
        if sys.argv[0] == "-c" and index == 1: os.abort()
        super().set_device(index)
"""


@pytest.fixture
def bad(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(BAD)
    return lambda name: f"{file}:{name}"


@pytest.mark.parametrize(
    ("name", "check", "message"),
    [
        ("Hangs", "synchronize", r"did not end in 5 s\n  at: \S+bad.py:\d+, in synchronize$"),
        (
            "Crashes",
            "rng-seed",
            r"ended its process \(status -11\).*\n  at: .*, called from \S+bad.py:\d+, in manual_seed$",
        ),
        ("Quits", "rng-seed", r"SystemExit: no licence\n  at: \S+bad.py:\d+, in manual_seed$"),
        ("WrongTypes", "contract", r"device_count\(\) returns a str\n  found: 'two'\n  legal: int\n  do: "),
    ],
)
def test_a_platform_that_misbehaves_fails_the_check_and_the_rest_go_on(bad, name, check, message):
    report = runner.run(bad(name), only=["features", "contract", "rng-seed", "synchronize"], timeout_s=5)
    failed = {result.name: result.message for result in report.results if result.verdict == "failed"}
    assert set(failed) == {check} and re.search(message, failed[check]), report.to_table()
    assert len(report.results) == 4


@pytest.mark.parametrize(
    ("target", "messages"),
    [
        ("Half", ["platform Half is not complete", "missing: collective"]),
        ("Raises", ["bad.py:Raises what it is raised KeyError: 'x'\n  at: ", "in device_count"]),
        pytest.param("Stuck", ["platform did not end in 6 s\n  at: ", "in device_count"], marks=pytest.mark.slow),
        ("NoDriver", ["torch can't use 'simx' devices here: OSError: libchip.so", "do: install the no_driver"]),
    ],
)
def test_what_can_not_be_asked_is_said_with_its_cause(bad, tmp_path, monkeypatch, target, messages):
    (tmp_path / "no_driver.py").write_text("raise OSError('libchip.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)  # what a test runner adds reaches the kit's processes
    with pytest.raises(runner.Unusable) as error:
        runner.run(bad(target), timeout_s=6 if target == "Stuck" else 60)
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
    with pytest.raises((ValueError, ImportError), match=r"asked: "):
        _target.load(target)


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("NotAPlatform", ["not a platform", "derived from verl_fl.platform.Platform"]),
        ("Absent", ["has no Absent", "Hangs, Crashes"]),
    ],
)
def test_what_is_no_platform_is_said_in_four_parts(bad, name, messages):
    with pytest.raises((TypeError, ValueError)) as error:
        _target.load(bad(name))
    assert all(message in str(error.value) for message in messages), error.value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "StuckRank",
            r"collectives did not end in 1\d s(?s:.*)rank 1: it hung\n  at: \S+bad.py:\d+, in set_device",
        ),
        ("DeadRank", r"rank 1: it ended with status -6.*\n  at: \S+bad.py:\d+, in set_device"),
    ],
)
def test_a_rank_that_hangs_or_dies_is_said_with_its_place(bad, name, message):
    result = runner.run(bad(name), only=["collectives"], timeout_s=14).results[0]
    assert result.verdict == "failed" and re.search(message, result.message), result.message


def test_a_run_whose_time_is_over_says_what_was_not_asked():
    report = runner.run(CPU, only=["names", "contract"], within_s=1e-9)
    assert [result.verdict for result in report.results] == ["failed", "failed"]
    assert "not asked: the run's 1e-09 s were over" in report.results[0].message


@pytest.mark.slow
def test_a_run_that_takes_too_long_ends_and_says_where_it_was(bad):
    start = time.monotonic()
    report = runner.run(bad("Hangs"), only=["synchronize", "backend-string", "fsdp2-step"], within_s=6)
    messages = {result.name: result.message for result in report.results}
    assert time.monotonic() - start < 15 and not report.passed and report.count("failed") == 3
    assert "in synchronize" in messages["synchronize"] and "the run's 6 s were over" in messages["fsdp2-step"]


def test_a_chip_that_a_check_takes_down_costs_the_checks_after_it_and_not_the_report(bad):
    report = runner.run(bad("Lost"), only=["features", "rng-seed", "synchronize"])
    assert [result.verdict for result in report.results] == ["passed", "failed", "failed"], report.to_table()
    assert re.search(r"ended its process \(status 3\); it said last: .* driver panic$", report.results[1].message)
    assert "has no device that this process can use" in report.results[2].message


@pytest.mark.parametrize("limits", [{"timeout_s": 0}, {"timeout_s": -1}, {"timeout_s": float("nan")}, {"within_s": 0}])
def test_a_limit_that_is_no_time_is_refused_and_not_blamed_on_the_platform(limits):
    with pytest.raises(ValueError, match="a limit is no time"):
        runner.run(CPU, **limits)


def test_the_target_may_be_the_class_itself():
    from verl_fl.platform.cpu import CPUPlatform

    class Local(CPUPlatform):
        pass

    assert _target.spell(CPUPlatform) == CPU
    with pytest.raises(ValueError, match="another process can't find"):
        runner.run(Local)


@pytest.mark.slow
def test_a_serial_number_is_a_uuid_too_and_one_device_is_enough(monkeypatch, tmp_path):
    file = tmp_path / "serial.py"
    file.write_text(
        "from verl_fl.testing.simulated.vendors import SimX\n"
        "class Serial(SimX):\n"
        "    def get_device_uuid(self, device_id):\n"
        "        return self.device_module.get_device_name(device_id)\n"
    )
    monkeypatch.setenv("SIMX_VISIBLE_DEVICES", "2")
    report = runner.run(f"{file}:Serial", only=["uuid", "collectives"])
    assert [result.verdict for result in report.results] == ["passed", "skipped"], report.to_table()


def test_in_a_vendors_test_suite_a_target_that_can_not_be_asked_is_tried_once_and_fails_each_case(tmp_path):
    from verl_fl.testing import conformance_tests

    file, tries = tmp_path / "chip.py", tmp_path / "tries"
    file.write_text(f"open({str(tries)!r}, 'a').write('x')\nraise OSError('no driver')\n")
    test = conformance_tests(f"{file}:Chip")
    for check in ("names", "uuid"):
        with pytest.raises(pytest.fail.Exception, match="OSError: no driver"):
            test(check)
    assert tries.read_text() == "x"


def _device_check(*arguments, **environment):
    env = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run([DEVICE_CHECK, *arguments], env=env, capture_output=True, text=True)


def test_device_check_finds_the_platform_and_the_cpu_passes_all():
    done = _device_check(VERL_PLATFORM="cpu")
    report = Report.from_json(done.stdout)
    assert done.returncode == 0 and report.passed and not report.simulated, done.stdout
    assert (report.target, report.count("passed"), report.count("skipped")) == (CPU, len(CHECKS) - 5, 5)
    assert "cores" in report.machine and "skipped  streams" in done.stderr


def test_device_check_says_which_python_has_no_torch(tmp_path):
    for python in (tmp_path / "gone", tmp_path / "python"):
        done = _device_check(PYTHON=str(python))
        assert done.returncode == 2 and done.stdout == "" and f"asked: {python}" in done.stderr, done.stderr
        (tmp_path / "python").write_text("#!/bin/sh\necho 'ModuleNotFoundError: torch' >&2; exit 1\n")
        (tmp_path / "python").chmod(0o755)


def _command(*arguments):
    return __main__.main([str(argument) for argument in arguments])


def test_the_command_writes_a_table_json_and_junit_and_says_it_with_its_status(tmp_path, capsys):
    good, junit = tmp_path / "report.json", tmp_path / "report.xml"
    assert _command(CPU, "--only", "uuid", "--only", "streams", "--json", good, "--junit", junit) == 0
    table = capsys.readouterr().out
    assert f"{CPU}: 1 passed, 0 failed, 1 skipped" in table
    assert "skip  streams" in table and "the host is the device" in table
    assert json.loads(good.read_text())["passed"] is True
    suite = ElementTree.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "0", "1")

    assert _command(f"{MUTANTS_FILE}:RayResource", "--only", "ray-resource", "--json", "-", "--junit", junit) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["passed"], report["results"][0]["verdict"]) == (False, "failed")
    assert "counts no devices" in ElementTree.parse(junit).getroot().find("testcase/failure").text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--junit", "/no/such/folder/x.xml"], "asked: /no/such/folder/x.xml"),
        (["--only", "names", "--skip", "names"], "no check is left to run"),
        (["--timeout", "nan"], "a limit is no time"),
        (["--only", "no-such-check"], "legal: names, contract"),
    ],
)
def test_the_command_refuses_what_it_can_not_do(capsys, wrong, message):
    assert _command(CPU, *wrong) == 2
    assert message in capsys.readouterr().err


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
