"""What is read while a run goes on, what is made of it, and that nothing of it is left behind."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from verl_fl.cli import curve, metrics, options, progress, summary, toy, toy_reward
from verl_fl.cli.child import MARKER, Child, marked
from verl_fl.cli.metrics import Step


def line(number, reward: float | None = 0.5, seconds=2.0, tokens=100):
    data = {"critic/score/mean": reward, "timing_s/step": seconds, "perf/total_num_tokens": tokens}
    return json.dumps({"step": number, "data": data | {"response_length/mean": 16.0}})


def steps(*rewards, seconds=2.0, tokens=100):
    return [
        Step(number=number, reward=reward, seconds=seconds, tokens=tokens, response_length=16)
        for number, reward in enumerate(rewards, start=1)
    ]


# --- metrics ---


def test_a_line_of_verls_file_logger_becomes_a_step():
    assert metrics.parse(line(3)) == Step(number=3, reward=0.5, seconds=2.0, tokens=100, response_length=16.0)


@pytest.mark.parametrize("text", ["", "{", '{"step": 1}', '{"step": 0, "data": {"val-core/x": 1.0}}', "[]"])
def test_what_is_no_training_step_is_none(text):
    assert metrics.parse(text) is None


def test_a_step_without_a_reward_is_kept_as_not_a_number():
    reward = metrics.parse(line(1, reward=None)).reward
    assert reward != reward


def test_the_tail_waits_for_the_file_and_for_the_end_of_a_line(tmp_path):
    tail = metrics.Tail(tmp_path / "m")
    assert tail.lines() == []
    with open(tmp_path / "m", "w") as file:
        file.write("one\ntw")
        file.flush()
        assert tail.lines() == ["one"]
        file.write("o\n")
        file.flush()
        assert tail.lines() == ["two"]
        assert tail.lines() == []


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path):
    (tmp_path / "metrics-1.jsonl").write_text("\n".join(line(number, 0.1) for number in (1, 2, 3, 4)))
    (tmp_path / "metrics-2.jsonl").write_text(line(3, 0.9))
    found = metrics.read(metrics.files(tmp_path))
    assert [(step.number, step.reward) for step in found] == [(1, 0.1), (2, 0.1), (3, 0.9)]
    assert metrics.next_file(tmp_path).name == "metrics-3.jsonl"


def test_the_last_validation_is_found_among_the_steps(tmp_path):
    assert metrics.validation([]) == {}
    score = {"step": 2, "data": {"val-core/mine/acc": 0.75, "val-aux/x": 1.0}}
    (tmp_path / "metrics-1.jsonl").write_text("\n".join([line(1), json.dumps(score), line(2), "{cut"]))
    assert metrics.validation(metrics.files(tmp_path)) == {"val-core/mine/acc": 0.75}


# --- summary ---


def test_the_first_and_last_reward_are_means_of_three_steps():
    found = summary.figures(steps(0.0, 0.1, 0.2, 0.9, 0.6, 0.7, 0.8), wall_s=10.0)
    assert (found["reward_first"], found["reward_last"], found["steps"]) == (0.1, 0.7, 7)
    assert found["train_seconds"] == 10.0
    assert found["tokens_per_second"] == 70.0


def test_a_step_without_a_row_is_counted():
    assert summary.figures([step for step in steps(0.1, 0.2, 0.3, 0.4) if step.number != 3])["steps"] == 4


def test_without_a_clock_the_steps_own_times_count():
    assert summary.figures(steps(0.5, 0.5))["train_seconds"] == 4.0


def test_rewards_that_are_no_numbers_do_not_spoil_the_mean():
    assert summary.figures(steps(float("nan"), 0.2, 0.4))["reward_first"] == 0.3
    assert summary.figures(steps(float("nan")))["reward_first"] is None


def test_summary_json_has_what_the_issue_names(tmp_path):
    chosen = options.resolve({"seed": 7}, ["a=1"], tmp_path)
    target = summary.write(chosen, steps(0.1, float("nan")), 4.0, ["verl", "a=1"], {"log": "x"})
    found = json.loads(target.read_text())
    assert target.name == "summary.json"
    assert {"reward_first", "reward_last", "steps", "train_seconds", "tokens_per_second", "seed"} <= found.keys()
    assert found["seed"] == 7 and found["options"]["overrides"] == ["a=1"]
    assert found["versions"]["verl"] and found["rewards"] == [0.1, None]


# --- progress ---


def test_without_a_terminal_each_step_is_a_line():
    out = io.StringIO()
    with progress.Progress(3, Path("run.log"), out=out) as shown:
        shown.log_line("INFO:x:all initialize finished, ready to fit")
        shown.log_line("ray init kwargs: late, and not a step back")
        shown.step(steps(0.25)[0])
    text = out.getvalue()
    assert "first step" in text and "starting Ray" not in text
    assert "step   1/3  reward  0.250       50 tokens/s" in text


def test_an_error_that_does_not_end_the_run_reaches_the_screen_once():
    out = io.StringIO()
    shown = progress.Progress(3, Path("run.log"), out=out)
    for count in (1, 10):
        shown.log_line(
            f"\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m ERROR:2026-11-30 20:48:04,086:reward: it raised ({count} x)"
        )
    shown.log_line("(TaskRunnerV1 pid=7) INFO:2026-11-30 20:48:04,086:reward: all well")
    assert out.getvalue() == "error: reward: it raised (1 x)\n"


def test_train_seconds_runs_from_the_first_steps_start_to_the_last_ones_end(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = progress.Progress(2, Path("run.log"), out=io.StringIO())
    assert shown.train_seconds is None
    first, second = steps(0.1, 0.2, seconds=2.0)
    now[0] = 110.0
    shown.step(first)
    now[0] = 117.0
    shown.step(replace(second, validation_seconds=4.0))
    assert shown.train_seconds == 5.0, "validation after the last step is not training"


def test_a_run_in_which_nothing_happens_says_so_once_a_minute(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    shown = progress.Progress(2, Path("run.log"), out=out)
    for second in range(0, 130, 10):
        now[0] = float(second)
        shown.tick()
    assert out.getvalue().count("still at: starting Ray") == 2
    assert "run.log" in out.getvalue()


def test_the_curve_rises_with_the_reward_and_survives_one_step(tmp_path):
    rows = curve.in_terminal(steps(0.0, 0.5, 1.0), width=40).splitlines()
    assert rows[0].count("█") < rows[-4].count("█")
    assert "step" in curve.in_terminal(steps(0.5), width=40)
    assert curve.in_terminal(steps(float("nan")), width=40) == "no rewards to show"
    assert max(map(len, curve.in_terminal(steps(*[0.5] * 500), width=60).splitlines())) <= 68
    curve.as_png(steps(0.1, 0.9), tmp_path / "c.png", "x")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


# --- the toy ---


def test_the_toys_reward_is_the_share_of_right_characters():
    assert toy_reward.compute_score("", "0123456789012345", "digits") == 1.0
    assert toy_reward.compute_score("", "0123456789012345", "vowels") == 0.0
    assert toy_reward.compute_score("", "aeiou", "vowels") == pytest.approx(5 / 16), "stopping early does not pay"
    assert toy_reward.compute_score("", "", "digits") == 0.0


def test_the_toys_prompts_follow_from_the_seed_and_have_verls_columns(tmp_path):
    import pyarrow.parquet

    def rows(seed):
        toy.make_data(tmp_path / "d" / "t.parquet", tmp_path / "reward.py", seed)
        return pyarrow.parquet.read_table(tmp_path / "d" / "t.parquet").to_pylist()

    first = rows(0)
    assert first == rows(0) != rows(1)
    assert {"prompt", "data_source", "reward_model", "extra_info"} <= first[0].keys()
    assert {row["reward_model"]["ground_truth"] for row in first} == set(toy_reward.CHARACTERS)
    assert "def compute_score" in (tmp_path / "reward.py").read_text()


def test_the_toys_model_follows_from_the_seed_and_its_tokenizer_is_lossless(tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        toy.make_model(tmp_path / name, seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(a[key].equal(b[key]) for key in a)
    assert not a["lm_head.weight"].equal(c["lm_head.weight"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert len(tokenizer.encode("\n")) == 1, "verl's Qwen templates need it"
    text = "<|im_start|>user\ndé \t水<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )
    assert shown == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


# --- the child ---

_STUBBORN = (
    "import signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
    "print('up', flush=True)\n"
    "time.sleep(60)\n"
)


def wait_until(condition, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_leaving_the_child_ends_its_whole_family_and_removes_rays_files(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_fl.cli.child._wait", lambda mark, patience_s: time.sleep(0.3))
    with Child(tmp_path, tmp_path / "m") as child:
        child.start([sys.executable, "-c", _STUBBORN])
        wait_until(lambda: "up" in child.log.read_text() and len(marked(child.mark)) == 2)
        assert len(child.ray_dir) < 30, "Ray's sockets have about 100 characters in all"
        other = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], env=os.environ | {MARKER: "other"}
        )
    try:
        assert marked(child.mark) == []
        assert not os.path.exists(child.ray_dir)
        assert other.poll() is None, "a process of another run was ended"
    finally:
        other.kill()
        other.wait()


def test_a_child_that_obeys_ctrl_c_is_given_the_time_to(tmp_path):
    code = (
        "import time\nprint('up', flush=True)\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    time.sleep(0.5); print('tidy', flush=True)\n"
    )
    with Child(tmp_path, tmp_path / "m") as child:
        child.start([sys.executable, "-c", code])
        wait_until(lambda: "\nup" in child.log.read_text())
        child.interrupt()
        assert child.poll() == 0
        assert "tidy" in child.log.read_text()


def test_the_child_meets_no_ray_of_somebody_elses(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with Child(tmp_path, tmp_path / "m") as child:
        child.start([sys.executable, "-c", "import os; print('address', os.environ.get('RAY_ADDRESS'))"])
        wait_until(lambda: child.poll() is not None)
        assert "\naddress None" in child.log.read_text()


def test_sigterm_ends_like_ctrl_c():
    from verl_fl.cli import quickstart

    with pytest.raises(KeyboardInterrupt), quickstart._sigterm_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
