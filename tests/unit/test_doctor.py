"""doctor tells a healthy installation from a broken one, and never breaks itself."""

import io
import json

import pytest
from rich.console import Console

from verl_fl.cli import doctor, doctor_view


def requirement(**changes):
    return doctor.Requirement(**({"package": "torch", "tested": ">=0", "module": None} | changes))


def packages(monkeypatch, *requirements):
    monkeypatch.setattr(doctor, "REQUIREMENTS", requirements)
    report = doctor.Report()
    doctor._packages(report)
    return report


def test_this_installation_is_healthy_and_its_json_is_complete(capsys):
    assert doctor.run(as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] is True and found["problems"] == []
    assert {row["name"] for row in found["packages"]} >= {"python", "torch", "ray", "verl", "transformers", "vllm"}
    assert found["platform"]["name"] and found["platform"]["probes"]["cpu"] == {
        "found": True,
        "reason": found["platform"]["probes"]["cpu"]["reason"],
    }
    assert all(probe["reason"] for probe in found["platform"]["probes"].values())
    assert "native" in found["registered"]["rollouts"]
    assert any("cpu" in engine for engine in found["registered"]["engines"])
    assert {"sync"} <= set(found["registered"]["trainers"])
    assert found["machine"]["memory_total_bytes"] > 0


def test_every_patch_is_listed_and_applied_unless_a_package_is_absent():
    from verl_fl.patches import LEDGER

    report = doctor.examine()
    assert {patch["name"] for patch in report.patches} == set(LEDGER.patches)
    for patch in report.patches:
        assert patch["state"] == "applied" or "not importable here" in patch["note"], patch
        assert patch["why"] and patch["target"]


def test_a_missing_package_that_is_needed_is_a_problem_with_its_remedy(monkeypatch):
    report = packages(monkeypatch, requirement(package="no-such-package", tested=">=3"))
    assert not report.healthy
    assert report.problems == ["no-such-package is not installed\n  do: pip install 'no-such-package>=3'"]


def test_a_missing_package_that_only_something_needs_is_told_but_no_problem(monkeypatch):
    report = packages(monkeypatch, requirement(package="no-such-package", missing="rollout.name=x"))
    assert report.healthy
    assert report.missing[0]["for"] == "rollout.name=x"


def test_a_version_outside_the_tested_range_is_a_problem(monkeypatch):
    report = packages(monkeypatch, requirement(package="rich", tested=">=9999"))
    assert "outside the tested range >=9999" in report.problems[0]


def test_a_package_that_is_installed_but_does_not_load_is_a_problem(monkeypatch, tmp_path):
    (tmp_path / "broken_sdk.py").write_text("raise OSError('libbroken.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    report = packages(monkeypatch, requirement(package="rich", module="broken_sdk"))
    assert "does not load (OSError: libbroken.so" in report.problems[0]


@pytest.mark.parametrize("absent", ["verl", "torch"])
def test_without_verl_or_torch_the_rest_is_still_told(monkeypatch, absent):
    monkeypatch.setattr(doctor, "REQUIREMENTS", (requirement(package="no-such-package"), requirement(package="rich")))
    rows = {"no-such-package": absent}
    original = doctor._packages

    def renamed(report):
        original(report)
        for row in report.packages:
            row["name"] = rows.get(row["name"], row["name"])

    monkeypatch.setattr(doctor, "_packages", renamed)
    report = doctor.examine()
    assert not report.healthy
    assert report.machine["cores"]
    assert bool(report.platform) == (absent == "verl")
    assert report.registered == {}


def test_an_unknown_platform_is_one_problem_with_its_own_remedy(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "moon")
    report = doctor.examine()
    assert len(report.problems) == 1, report.problems
    assert report.problems[0].count("\n  do: ") == 1 and "moon" in report.problems[0]


def test_an_unhealthy_report_exits_with_1_and_still_prints_json(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Report(problems=["torch is not installed"]))
    assert doctor.run(as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["healthy"] is False


def test_a_registry_that_moved_is_a_problem_and_not_an_exception(monkeypatch):
    def moved():
        raise AttributeError("module verl has no attribute X")

    monkeypatch.setattr(doctor, "_registries", moved)
    report = doctor.examine()
    assert any("verl's registries: AttributeError" in problem for problem in report.problems)


def test_the_tables_fit_into_100_columns_and_hide_nothing():
    report = doctor.examine()
    out = io.StringIO()
    doctor_view.show(report, Console(file=out, width=100))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    assert "healthy" in text.splitlines()[-1]
    for patch in report.patches:
        assert patch["name"] in text
    assert "…" not in text
