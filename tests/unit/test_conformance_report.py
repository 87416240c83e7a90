"""A report is readable to people, valid to machines, and survives whatever a driver says."""

import json
from xml.etree import ElementTree

import pytest

from verl_fl.testing.conformance import _limit, _place
from verl_fl.testing.conformance.report import Report, Result

WHY = "a run could not be repeated"


def result(name, verdict, message=""):
    return Result(name=name, verdict=verdict, seconds=0.25, message=message, why=WHY, group="random")


def report(*results):
    platform = {"name": "newchip", "vendor": "acme", "device": "newchip", "chip": "NC-1", "devices": "2"}
    return Report(target="pkg:NewChip", platform=platform, torch="2.13.0", results=list(results))


HOSTILE = '\x1b[31mdriver\x00 <says> & "no"\x1b[0m \udcff\n  at: chip.py:7, in seed'


@pytest.mark.parametrize("message", [HOSTILE, "", "\n", "\ufffe", "ok \U0001f600 \u00e9"])
@pytest.mark.parametrize("verdict", ["failed", "skipped", "passed"])
def test_every_message_gives_valid_xml_json_and_text(tmp_path, message, verdict):
    one = report(result("rng-seed", verdict, message))
    (tmp_path / "x.xml").write_text(one.to_junit(), encoding="utf-8")
    suite = ElementTree.parse(tmp_path / "x.xml").getroot()
    assert suite.get("failures") == str(int(verdict == "failed"))
    (tmp_path / "x.json").write_text(one.to_json(), encoding="utf-8")
    assert Report.from_json((tmp_path / "x.json").read_text(encoding="utf-8")) == one
    table = one.to_table()
    table.encode("utf-8")
    assert "\x1b" not in table and "\x00" not in table


def test_junit_holds_one_case_for_each_check_with_its_verdict_and_reason():
    found = report(
        result("a", "passed", "in 2 processes"),
        result("b", "failed", "wrong\n  do: mend"),
        result("c", "skipped", "no"),
    )
    suite = ElementTree.fromstring(found.to_junit().split("\n", 1)[1])
    assert suite.tag == "testsuite" and (suite.get("tests"), suite.get("errors"), suite.get("time")) == (
        "3",
        "0",
        "0.750",
    )
    a, b, c = suite.findall("testcase")
    assert list(a) == [] and c.find("skipped").get("message") == "no"
    assert b.find("failure").get("message") == "wrong"
    assert b.find("failure").text == f"wrong\n  do: mend\nwhy it matters: {WHY}"


def test_the_table_says_what_a_pass_rests_on_and_what_to_do():
    table = report(result("a", "passed", "in 2 processes"), result("bb", "failed", "wrong\n  do: mend")).to_table()
    lines = table.splitlines()
    assert lines[0] == "newchip (acme), 2 x NC-1, real; torch 2.13.0"
    assert lines[1].startswith("ok    a ") and lines[1].endswith("in 2 processes")
    assert lines[2].startswith("FAIL  bb") and lines[3:6] == [
        "      wrong",
        "        do: mend",
        f"      why it matters: {WHY}",
    ]
    assert lines[-1] == "pkg:NewChip: 1 passed, 1 failed, 0 skipped"


def test_a_skip_is_never_counted_as_passed():
    data = json.loads(report(result("a", "skipped", "one device"), result("b", "passed")).to_json())
    assert [check["verdict"] for check in data["results"]] == ["skipped", "passed"] and data["passed"] is True


@pytest.mark.parametrize("text", ["[]", "null", "3", '{"schema": 0}'])
def test_what_is_no_report_is_refused(text):
    with pytest.raises(ValueError, match="not a conformance report of schema 1"):
        Report.from_json(text)


HANG = """noise
Timeout (0:00:04.75)!
Thread 0x1 (most recent call first):
  File "/usr/lib/watch.py", line 1 in watch

Thread 0x2 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/c10d.py", line 9 in all_reduce
  File "/chip/comm.py", line 12 in sum
  File "/chip/main.py", line 3 in run
"""

CRASH = """noise
Fatal Python error: Segmentation fault

Current thread 0x2 (most recent call first):
  File "/chip/driver.py", line 5 in seed

Thread 0x1 (most recent call first):
  File "/usr/lib/watch.py", line 1 in watch

Extension modules: numpy, torch (total: 2)
"""


def test_the_place_of_a_hang_and_of_a_crash_is_read_from_the_stacks():
    torch_line = "/env/lib/python3.11/site-packages/torch/distributed/c10d.py:9, in all_reduce"
    assert _place.stuck(HANG) == f"\n  at: {torch_line}, called from /chip/comm.py:12, in sum"
    assert _place.stuck(CRASH) == "\n  at: /chip/driver.py:5, in seed"
    assert _place.before(HANG) == _place.before(CRASH) == "noise"
    assert [_place.stuck(text) for text in ("", "noise", "Timeout (0:00:01)!\n")] == ["", "", ""]


def test_what_a_check_starts_has_less_time_than_the_check():
    _limit.start(100.0)
    assert 89 < _limit.left() <= 90
    _limit.start(0.5)
    assert _limit.left() == 1.0
