"""``doctor --link`` and the measurement on one node, as their users run them."""

import json
import os
import subprocess
import sys

from verl_fl.weight_sync import probe


def _run(*arguments, **env):
    command = [sys.executable, "-m", "verl_fl.cli.main", "doctor", "--link", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
    )


def test_two_nodes_measure_their_link_and_end():
    with _run("listen", VERL_FL_SECRET="one for this test") as listening:
        line = next(line for line in listening.stdout if "--link tcp://" in line)
        assert "VERL_FL_SECRET=one for this test" in line
        address = line.split()[-1]
        with _run(address, VERL_FL_SECRET="another one here") as stranger:
            out, err = stranger.communicate(timeout=60)
            assert stranger.returncode == 1 and "different secrets" in err and "Traceback" not in err
        with _run(address, VERL_FL_SECRET="one for this test") as measuring:
            out, err = measuring.communicate(timeout=60)
        assert measuring.returncode == 0, err
        rows = json.loads(out.splitlines()[-1])
        assert [(row["transport"], row["used"]) for row in rows] == [("auto", "shm"), ("tcp", "tcp")]
        assert all(row["gbps"] > 0 for row in rows)
        assert listening.wait(30) == 0


def test_what_is_no_address_is_said(capsys, monkeypatch):
    monkeypatch.setenv("VERL_FL_SECRET", "one for this test")
    assert probe.main(["--to", "node7"]) == 1
    assert "'node7' is no address of a receiver" in capsys.readouterr().err
    monkeypatch.delenv("VERL_FL_SECRET")
    assert probe.main(["--to", "tcp://127.0.0.1:9"]) == 1
    assert "VERL_FL_SECRET" in capsys.readouterr().err


def test_every_transport_of_one_node_is_measured_and_verified():
    rows = probe.on_this_node("cpu")
    assert [row["used"] for row in rows] == ["tcp", "unix", "shm"]
