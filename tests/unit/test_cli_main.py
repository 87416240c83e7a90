"""The command itself: light, and with one clean message for each mistake."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "ray", "verl", "transformers", "numpy", "pyarrow", "matplotlib", "hydra", "pandas", "vllm"}


def verl_fl(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "verl_fl.cli.main", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["quickstart", "--help"], ["doctor", "--help"]])
def test_asking_for_help_loads_nothing_heavy(arguments):
    code = (
        "import sys\nfrom verl_fl.cli.main import main\n"
        f"sys.argv = ['verl-fl', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"print('heavy:', sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("heavy: []"), done.stdout


def test_version_is_the_packages():
    from verl_fl import __version__

    assert verl_fl("--version").stdout.strip() == f"verl-fl {__version__}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quickstart", "--steps", "0"], "--steps 0 is too small"),
        (["quickstart", "--model", "absent.gguf"], "no model file absent.gguf"),
        (["quickstart", "nonsense"], "is not an override"),
        (["quickstart", "--resume", "absent"], "is not a run folder"),
        (["quickstart", "--steps", "many"], "--steps"),
        (["quickstart", "--model", "verl-fl-tests/absent"], "can't be had"),
        (["quickstart", "--colour", "red"], "--colour"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_a_mistake_is_one_message_with_exit_code_2_and_leaves_no_folder(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    done = verl_fl(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert list(tmp_path.iterdir()) == []
