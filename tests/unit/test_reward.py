"""Rewards: what a user's function may do to the run, which is nothing but fail its own sample."""

import asyncio
import os
import pickle
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_fl.reward.child import normalise
from verl_fl.reward.guard import REASON, FailedScore, GuardedReward, failure_of, in_process
from verl_fl.reward.pool import RewardPool

USER_CODE = """
import os, sys, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if data_source == "sleep": time.sleep(60)
    if data_source == "spin":
        while True: pass
    if data_source == "exit": os._exit(3)
    if data_source == "sys_exit": sys.exit(1)
    if data_source == "raise": raise ValueError("no such answer")
    if data_source == "huge": return {"score": 1.0, "log": "x" * (20 << 20)}
    if data_source == "print": print("x" * 300_000)
    if data_source == "none": return None
    if data_source == "nan": return float("nan")
    if data_source == "score_acc": return {"score": 0.5, "acc": True}
    if data_source == "score": return {"score": 0.25}
    if data_source == "acc": return {"acc": 1}
    if data_source == "pid": return os.getpid()
    return len(solution_str) + bonus
async def judged(data_source, solution_str, ground_truth, extra_info=None):
    import asyncio
    if data_source == "sleep": await asyncio.sleep(60)
    return 1
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text(USER_CODE)
    return str(file)


@pytest.fixture
def pool(path):
    with RewardPool(path, "compute_score", timeout_s=1.0) as pool:
        yield pool


def ask(pool, source, text="abc"):
    return pool.call(data_source=source, solution_str=text, ground_truth="g", extra_info={"index": 0})


def test_a_call_that_sleeps_spins_raises_or_exits_fails_alone_and_within_the_limit(pool):
    assert ask(pool, "ok") == (3.0, None)
    start = time.monotonic()
    reasons = {source: ask(pool, source)[1] for source in ("sleep", "spin", "exit", "sys_exit", "raise", "huge")}
    assert time.monotonic() - start < 20
    assert reasons["sleep"] == reasons["spin"] == "took longer than 1 s"
    assert reasons["exit"] == "ended its process (exit status 3)"
    assert reasons["sys_exit"] == "called sys.exit(1)"
    assert reasons["raise"].startswith("raised ValueError: no such answer (") and "my_reward.py:" in reasons["raise"]
    assert reasons["huge"] == "returned 20 MB, and at most 16 are legal"
    assert ask(pool, "print") == (3.0, None)


def test_a_trivial_call_costs_less_than_two_milliseconds_and_keeps_its_process(pool):
    first = ask(pool, "pid")[0]
    best = min(_timed(lambda: [ask(pool, "ok", "x" * 2000) for _ in range(50)]) for _ in range(5)) / 50
    assert best < 0.002
    assert ask(pool, "pid")[0] == first


def _timed(function):
    start = time.monotonic()
    function()
    return time.monotonic() - start


def test_no_process_outlives_its_pool(path):
    with RewardPool(path, "compute_score", timeout_s=1.0) as pool:
        killed = int(ask(pool, "pid")[0])
        ask(pool, "spin")
        alive = int(ask(pool, "pid")[0])
        pids = {killed, alive, *pool.pids()}
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("before", ["its first message", "it has loaded"])
def test_a_child_whose_run_ends_before_says_nothing(tmp_path, before):
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(0.3)\ndef compute_score(**kwargs): return 1.0\n")
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "verl_fl.reward.child", str(theirs.fileno()), str(file), "compute_score"]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True) as child:
        theirs.close()
        with Connection(ours.detach()) as connection:
            if before == "it has loaded":
                connection.send([])
                time.sleep(0.1)
        said = child.communicate(timeout=30)[1]
    assert (child.returncode, said) == (0, "")


def test_a_file_that_can_not_be_loaded_is_named(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package\n")
    with RewardPool(str(broken), "compute_score", timeout_s=1.0) as pool:
        with pytest.raises(ValueError, match="no_such_package"):
            pool.kind()
        assert "could not be loaded" in ask(pool, "ok")[1]


@pytest.mark.parametrize(
    ("result", "value", "reason"),
    [
        (1, 1.0, None),
        (True, 1.0, None),
        ({"score": 0.5, "acc": 1}, {"score": 0.5, "acc": 1}, None),
        (None, None, "returned None"),
        (float("inf"), None, "returned inf"),
        ({"acc": 1}, None, "returned a dictionary without 'score' (keys: acc)"),
        ({"score": None}, None, "'score': returned None"),
        ("1", None, "returned a str: '1'"),
        ([1.0], None, "returned a list: [1.0]"),
    ],
)
def test_a_result_is_a_finite_number_or_a_dictionary_with_one(result, value, reason):
    assert normalise(result) == (value, reason)


def test_numpy_and_torch_scalars_are_numbers_and_vectors_are_not():
    import numpy as np
    import torch

    assert normalise(np.float32(0.5)) == (0.5, None)
    assert normalise(torch.tensor(0.5)) == (0.5, None)
    assert normalise(torch.tensor([0.5])) == (0.5, None)
    assert "more than one element" in normalise(torch.tensor([0.5, 1.0]))[1]
    assert "more than one element" in normalise(np.zeros(3))[1]


def test_mixed_result_shapes_give_one_entry_per_sample_in_order(path):
    reward = GuardedReward(path, "compute_score", {"bonus": 1.0}, 1.0)
    with reward.pool:
        sources = ["ok", "score_acc", "score", "acc", "none"]
        results = [reward(data_source=source, solution_str="abc", ground_truth="g") for source in sources]
    assert results[:3] == [4.0, {"score": 0.5, "acc": True}, {"score": 0.25}]
    assert [result["score"].reason for result in results[3:]] == [
        "returned a dictionary without 'score' (keys: acc)",
        "returned None",
    ]
    assert [set(result) for result in results[3:]] == [{"score"}, {"score"}]


def test_a_failed_sample_has_the_keys_of_the_last_good_one(path):
    reward = GuardedReward(path, "compute_score", {}, 1.0)
    with reward.pool:
        reward(data_source="score_acc", solution_str="abc", ground_truth="g")
        failed = reward(data_source="raise", solution_str="abc", ground_truth="g")
    assert failed == {"score": 0.0, "acc": False}
    assert failure_of({"reward_score": failed["score"], "reward_extra_info": failed}).startswith("raised ValueError")


def test_a_guarded_reward_and_its_failure_can_be_sent_to_another_process(path):
    reward = pickle.loads(pickle.dumps(GuardedReward(path, "compute_score", {"bonus": 2.0}, 1.0)))
    with reward.pool:
        assert reward(data_source="ok", solution_str="abc", ground_truth="g") == 5.0
    assert pickle.loads(pickle.dumps(FailedScore("late"))).reason == "late"


def test_a_coroutine_or_a_blocking_function_in_process_ends_at_the_limit(path):
    from verl_fl.reward.child import load

    judged = in_process(load(path, "judged"), {}, 0.2)
    slow = in_process(lambda **kwargs: time.sleep(1.0), {}, 0.2)

    async def both():
        kwargs = {"solution_str": "a", "ground_truth": "g"}
        good = await judged(data_source="x", **kwargs)
        late = [await judged(data_source="sleep", **kwargs), await slow(**kwargs)]
        return good, late

    good, late = asyncio.run(both())
    assert good == 1.0
    assert [score.reason for score in late] == ["took longer than 0.2 s"] * 2


# --- through verl's own reward worker, without Ray ---


def worker(path, name="compute_score", on_error="count", timeout_s=1.0):
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
    from verl.experimental.reward_loop.reward_manager import NaiveRewardManager
    from verl.trainer.ppo import reward

    config = OmegaConf.create(
        {
            "fl": {"reward": {"timeout_s": timeout_s, "on_error": on_error}},
            "reward": {
                "custom_reward_function": {"path": path, "name": name},
                "reward_model": {"enable": False},
                "reward_manager": {"name": "naive", "source": "register"},
            },
        }
    )
    worker = object.__new__(RewardLoopWorker)
    worker.config = config
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "x" * len(ids))
    worker.reward_manager = NaiveRewardManager(config, tokenizer, reward.get_custom_reward_fn(config))
    return worker


def sample(source):
    import numpy as np
    import torch
    from verl import DataProto

    return DataProto.from_dict(
        tensors={"responses": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.ones(1, 5, dtype=torch.long)},
        non_tensors={
            "data_source": np.array([source], dtype=object),
            "reward_model": np.array([{"ground_truth": "g"}], dtype=object),
            "extra_info": np.array([{}], dtype=object),
        },
    )


def score(worker, *sources):
    async def run():
        worker.reward_manager.loop = asyncio.get_running_loop()
        return await asyncio.gather(*(worker.compute_score(sample(source)) for source in sources))

    return asyncio.run(run())


def test_a_batch_with_bad_rewards_ends_in_seconds_and_says_which_failed(path):
    start = time.monotonic()
    good, *bad = score(worker(path), "ok", "sleep", "spin", "exit", "raise", "none", "acc")
    assert time.monotonic() - start < 20
    assert good == {"reward_score": 3.0, "reward_extra_info": {"acc": 3.0}}
    assert [result["reward_score"] for result in bad] == [0.0] * 6
    reasons = [result["reward_extra_info"][REASON] for result in bad]
    assert all(text.startswith(f"reward function compute_score of {path} ") for text in reasons)
    assert reasons[-1].endswith("returned a dictionary without 'score' (keys: acc); data_source 'acc'")
    assert not any(isinstance(value, FailedScore) for result in bad for value in result["reward_extra_info"].values())


def test_on_error_raise_ends_at_the_first_failure(path):
    from verl_fl.reward.guard import RewardFailed

    with pytest.raises(RewardFailed, match="returned None"):
        score(worker(path, on_error="raise"), "none")


def test_a_coroutine_reward_still_works(path):
    good, late = score(worker(path, name="judged", timeout_s=0.2), "x", "sleep")
    assert good["reward_score"] == 1.0
    assert "took longer than 0.2 s" in late["reward_extra_info"][REASON]


def test_a_row_without_ground_truth_is_a_failed_reward_and_not_a_lost_prompt(path):
    row = sample("ok")
    row.non_tensor_batch.pop("reward_model")
    target = worker(path)

    async def run():
        target.reward_manager.loop = asyncio.get_running_loop()
        return await target.compute_score(row)

    assert "KeyError: 'reward_model'" in asyncio.run(run())["reward_extra_info"][REASON]


def test_a_batch_of_the_colocated_path_has_the_same_keys_in_every_sample(path, caplog):
    import torch
    from verl import DataProto

    target = worker(path)
    batch = DataProto.concat([sample("ok"), sample("score_acc"), sample("none")])

    async def run():
        target.reward_manager.loop = asyncio.get_running_loop()
        return await target.compute_score_batch(batch)

    outputs = asyncio.run(run())
    assert torch.tensor([output["reward_score"] for output in outputs]).tolist() == [3.0, 0.5, 0.0]
    assert len({frozenset(output["reward_extra_info"]) for output in outputs}) == 1
    assert "returned None" in caplog.text

    with pytest.raises(RuntimeError, match="every reward call of the batch failed"):

        async def all_bad():
            target.reward_manager.loop = asyncio.get_running_loop()
            return await target.compute_score_batch(DataProto.concat([sample("none"), sample("acc")]))

        asyncio.run(all_bad())
