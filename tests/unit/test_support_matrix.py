"""The support matrix says what the reports in the repository say, and no more."""

from pathlib import Path

import pytest

from verl_fl.platform.manager import platform_classes
from verl_fl.testing.conformance import matrix, runner
from verl_fl.testing.conformance.report import Report, Result

PAGE = Path(__file__).parents[2] / "docs" / "support-matrix.md"


def row(page, name):
    return next(line for line in page.splitlines() if line.startswith(f"| {name}"))


def test_the_committed_page_is_the_generators():
    assert PAGE.read_text(encoding="utf-8") == matrix.matrix(matrix.reports())


def test_every_vendor_has_a_row_and_one_that_nobody_ran_says_so():
    page = matrix.matrix([])
    for name in platform_classes():
        assert row(page, name).count("not run") == len(matrix.groups())


def report(simulated, **verdicts):
    results = [
        Result(name=group, verdict=verdict, seconds=0.1, message="", why="", group=group)
        for group, verdict in verdicts.items()
    ]
    platform = {"name": "cuda", "vendor": "nvidia", "device": "cuda", "chip": "H200", "devices": "1"}
    return Report(target="t", platform=platform, simulated=simulated, date="2026-12-01", results=results)


def test_a_skipped_check_is_not_a_run_and_a_failed_one_is_not_hidden():
    line = row(matrix.matrix([report(False, memory="passed", streams="skipped", training="failed")]), "cuda: H200")
    cells = dict(zip(matrix.groups(), line.split(" | ")[1:], strict=False))
    assert (cells["memory"], cells["streams"], cells["training"]) == ("ran 1 of 3", "not run", "failed")
    simulated = row(matrix.matrix([report(True, memory="passed")]), "cuda: H200")
    assert " simulated 1 of 3 " in simulated and " ran " not in simulated


def test_a_column_that_one_device_can_not_prove_is_not_said_to_have_run():
    results = [
        Result(name="backend-string", verdict="passed", seconds=0, message="", why="", group="collectives"),
        Result(name="collectives", verdict="skipped", seconds=0, message="one device", why="", group="collectives"),
    ]
    one = report(False)
    one.results = results
    cells = dict(zip(matrix.groups(), row(matrix.matrix([one]), "cuda: H200").split(" | ")[1:], strict=False))
    assert cells["collectives"] == "ran 1 of 2"


def test_each_chip_of_a_vendor_has_its_row_whatever_it_is_called():
    other = report(False, memory="failed")
    other.platform["chip"] = "A100 | 80\nGB"
    page = matrix.matrix([report(False, memory="passed"), other])
    assert "ran" in row(page, "cuda: H200") and "failed" in row(page, "cuda: A100 / 80 GB")
    assert row(page, "cuda: A100").count(" | ") == row(page, "cuda: H200").count(" | ")


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1}', '{"schema": 1, "target": "t", "results": []}'])
def test_a_file_that_is_no_report_is_named(tmp_path, text):
    (tmp_path / "chip.json").write_text(text)
    with pytest.raises(ValueError, match=r"no conformance report(?s:.*)asked: \S+chip.json\n  do: "):
        matrix.reports(tmp_path)


def test_a_report_survives_its_file_and_another_schema_is_refused():
    one = report(True, memory="passed", streams="skipped")
    assert Report.from_json(one.to_json()) == one
    with pytest.raises(ValueError, match="schema 1"):
        Report.from_json(one.to_json().replace('"schema": 1', '"schema": 2'))


def test_a_report_without_results_has_not_passed():
    assert not Report(target="t").passed and report(False, memory="skipped").passed
    assert runner.select_checks(only=["names"])[0].name == "names"
