"""Failures of a rollout, on verl's own replay buffers, with a dictionary in the TransferQueue's place."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorData, TensorDict

from verl_fl._settings import Settings
from verl_fl.patches import failures
from verl_fl.reward.guard import REASON, RewardFailed
from verl_fl.rollout import lost
from verl_fl.rollout.watch import METRICS, Watch


class FakeQueue:
    """The part of transfer_queue that a replay buffer uses: tags by partition and key, which merge."""

    def __init__(self):
        self.tags = {}

    def kv_list(self, partition_id=None):
        return {name: {key: dict(tag) for key, tag in keys.items()} for name, keys in self.tags.items()}

    def kv_batch_put(self, keys, partition_id, tags, fields=None):
        for key, tag in zip(keys, tags, strict=True):
            self.tags.setdefault(partition_id, {}).setdefault(key, {}).update(tag)

    def kv_clear(self, keys, partition_id):
        for key in keys:
            self.tags.get(partition_id, {}).pop(key, None)

    async def async_kv_put(self, key, partition_id, tag):
        self.kv_batch_put([key], partition_id, [tag])

    def prompt(self, uid, status, sessions=0, partition="train", **tag):
        self.kv_batch_put([uid], partition, [{"is_prompt": True, "status": status, "global_steps": 1, **tag}])
        for session in range(sessions):
            self.kv_batch_put([f"{uid}_{session}_0"], partition, [{"status": "success"}])


@pytest.fixture
def queue(monkeypatch):
    import transfer_queue
    from verl.trainer.ppo.v1 import replay_buffer

    queue = FakeQueue()
    monkeypatch.setattr(replay_buffer, "tq", queue)
    monkeypatch.setattr(transfer_queue, "async_kv_put", queue.async_kv_put)
    return queue


def make_buffer(cls_name="ReplayBuffer", mode="sync", settings=None, clock=None, **kwargs):
    from verl.trainer.ppo.v1 import replay_buffer

    buffer = getattr(replay_buffer, cls_name)(
        trainer_mode=mode,
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        **kwargs,
    )
    clock = {"clock": clock} if clock else {}
    buffer._fl_watch = Watch(settings or Settings(), batch_size=4, **clock)
    return buffer


def sample(buffer, batch_size, partition="train"):
    return buffer.sample(global_steps=1, partition_id=partition, batch_size=batch_size)


# --- causes ---


def test_a_batch_in_which_every_prompt_failed_names_the_cause(queue):
    queue.prompt("a", "failure", fl_error_0="TypeError: no such tool (agent.py:12)")
    queue.prompt("b", "failure", fl_error_0="TypeError: no such tool (agent.py:12)")
    with pytest.raises(RuntimeError) as error:
        sample(make_buffer(), 2)
    assert str(error.value).startswith("every prompt of the batch failed")
    assert "2 x TypeError: no such tool (agent.py:12)" in str(error.value)


def test_validation_with_only_failed_prompts_names_the_cause_too(queue):
    queue.prompt("a", "failure", partition="val", fl_error_0="OSError: gone")
    with pytest.raises(RuntimeError, match="every prompt of the val batch failed\n  found: 1 x OSError: gone"):
        sample(make_buffer(), 1, "val")


def test_a_failed_group_is_counted_and_its_cause_is_logged_once(queue, caplog):
    for number in range(5):
        queue.prompt(f"bad{number}", "failure", fl_error_1=f"ValueError: row {number} is odd (agent.py:3)")
    queue.prompt("good", "finished", sessions=2)
    batch, metrics = sample(make_buffer(), 6)
    assert len(batch.keys) == 2
    assert metrics["training/rollout/failed_groups"] == 5
    assert metrics["training/reward/failed"] == 0
    assert [record.levelname for record in caplog.records if "is odd" in record.message] == ["ERROR"]


def test_counts_of_validation_do_not_leak_into_training(queue):
    buffer = make_buffer()
    queue.prompt("v", "failure", partition="val", fl_error_0="OSError: gone")
    queue.prompt("w", "finished", sessions=1, partition="val")
    queue.prompt("t", "finished", sessions=1)
    assert sample(buffer, 2, "val")[1]["validation/rollout/failed_groups"] == 1
    assert sample(buffer, 1)[1]["training/rollout/failed_groups"] == 0


def test_async_training_stops_when_every_prompt_fails_instead_of_refilling_for_ever(queue):
    refilled = []

    def refill(count):
        for _ in range(count):
            refilled.append(len(refilled))
            queue.prompt(f"again{len(refilled)}", "failure", fl_error_0="KeyError: 'answer' (agent.py:9)")
        assert len(refilled) < 50

    buffer = make_buffer("ReplayBufferAsync", "separate_async", refill_fn=refill)
    queue.prompt("first", "failure", fl_error_0="KeyError: 'answer' (agent.py:9)")
    with pytest.raises(RuntimeError, match="8 prompts in a row failed\n  found: 8 x KeyError: 'answer'"):
        sample(buffer, 1)


def test_a_success_between_failures_ends_the_streak(queue):
    buffer = make_buffer("ReplayBufferAsync", "separate_async", refill_fn=lambda count: None)
    for number in range(20):
        queue.prompt(f"bad{number}", "failure", fl_error_0="OSError: gone")
        if number % 5 == 4:
            queue.prompt(f"good{number}", "finished", sessions=1)
        buffer._sync_metadata_from_transfer_queue()
    batch, metrics = sample(buffer, 4)
    assert len(batch.keys) == 4
    assert metrics["training/rollout/failed_groups"] == 20


# --- rewards and empty answers ---


def test_failed_rewards_are_counted_and_a_batch_of_them_ends_the_run(queue, caplog):
    buffer = make_buffer()
    queue.prompt("a", "finished", sessions=2, fl_reward_0="reward function f returned None")
    queue.prompt("b", "finished", sessions=2)
    assert sample(buffer, 2)[1]["training/reward/failed"] == 1
    assert "reward: reward function f returned None" in caplog.text

    queue.prompt(
        "c", "finished", sessions=2, fl_reward_0="f took longer than 1 s", fl_reward_1="f took longer than 1 s"
    )
    with pytest.raises(RuntimeError, match="every reward call of the batch failed.*\n.*2 of 2 calls: f took longer"):
        sample(buffer, 1)


def test_on_error_raise_ends_the_run_at_the_first_failed_reward(queue):
    queue.prompt("a", "failure", fl_fatal_1="reward function f returned None")
    queue.prompt("b", "running")
    with pytest.raises(
        RuntimeError, match="a reward call failed\n  asked: fl.reward.on_error=raise\n  found: reward fun"
    ):
        sample(make_buffer(), 2)


def test_a_batch_of_empty_answers_is_reported(queue, caplog):
    queue.prompt("a", "finished", sessions=2, fl_empty_0="empty answer", fl_empty_1="empty answer")
    buffer = make_buffer()
    assert sample(buffer, 1)[1]["training/rollout/empty_answers"] == 2
    assert "all 2 answers of the batch are empty" in caplog.text
    caplog.clear()
    queue.prompt("b", "finished", sessions=2, fl_empty_1="empty answer")
    assert sample(buffer, 1)[1]["training/rollout/empty_answers"] == 1
    assert "answers of the batch are empty" not in caplog.text


# --- in the worker ---


def run_session(monkeypatch, error=None, kwargs=None):
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    async def body(self, *args, **kwargs):
        if error is not None:
            raise error
        return "done"

    wrapped = failures.failure_in_tag(body)
    assert AgentLoopWorker._run_agent_loop.__wrapped__  # the ledger's own wrapper is in force as well
    kwargs = kwargs if kwargs is not None else {"uid": "a", "session_id": 1}
    return asyncio.run(wrapped(None, {}, {"validate": False}, agent_name="x", **kwargs))


def test_an_exception_in_an_agent_loop_stands_in_its_prompts_tag_and_is_raised(queue, monkeypatch):
    with pytest.raises(ValueError, match="bad\ntool"):
        run_session(monkeypatch, ValueError("bad\ntool"))
    text = queue.tags["train"]["a"]["fl_error_1"]
    assert text.startswith("ValueError: bad tool (") and "test_failures.py:" in text
    assert run_session(monkeypatch) == "done"


def test_a_reward_that_is_to_end_the_run_is_marked_so(queue, monkeypatch):
    with pytest.raises(RewardFailed):
        run_session(monkeypatch, RewardFailed("f returned None"))
    assert queue.tags["train"]["a"] == {"fl_fatal_1": "f returned None"}


def test_without_a_prompt_id_nothing_is_published(queue, monkeypatch):
    with pytest.raises(ValueError):
        run_session(monkeypatch, ValueError("x"), kwargs={})
    assert queue.tags == {}


def make_output(response_ids):
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    return AgentLoopOutput(
        prompt_ids=[1, 2],
        response_ids=response_ids,
        response_mask=[1] * len(response_ids),
        response_logprobs=[-0.5] * len(response_ids),
        metrics=AgentLoopMetrics(),
        extra_fields={},
    )


def test_a_failed_reward_leaves_the_sample_and_reaches_the_tag(queue):
    async def original(self, outputs, kwargs):
        outputs[-1].reward_score = 0.0
        outputs[-1].extra_fields["reward_extra_info"] = {"acc": 0.0, REASON: "f returned None"}

    async def session():
        failures._SESSION.set(("a", "train", 0))
        worker = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=7))
        outputs = [make_output([5, 6])]
        await failures.score_in_tag(original)(worker, outputs, kwargs={})
        return outputs[0]

    output = asyncio.run(session())
    assert output.extra_fields["reward_extra_info"] == {"acc": 0.0}
    assert queue.tags["train"]["a"] == {"fl_reward_0": "f returned None"}


def test_an_empty_answer_keeps_its_score_and_teaches_nothing():
    output = make_output([])
    output.reward_score = -1.0
    with pytest.raises(IndexError):  # stock verl; once this no longer raises, fill_empty may go
        output.as_dict()
    failures.fill_empty(output, 7)
    fields = output.as_dict()
    assert fields["responses"].tolist() == [7]
    assert fields["response_mask"].tolist() == [0]
    assert fields["rm_scores"].tolist() == [-1.0]
    assert fields["rollout_log_probs"].tolist() == [0.0]
    full = make_output([5, 6])
    failures.fill_empty(full, 7)
    assert full.response_ids == [5, 6]


# --- lost prompts ---


class FakeManager:
    def __init__(self, queue, workers):
        self.queue, self.agent_loop_workers, self.sent = queue, workers, []

    def generate_sequences(self, prompts):
        lost.remember(self, prompts)
        self.sent.append([str(uid) for uid in prompts["uid"]])


class FakeTrainer:
    def __init__(self, queue, manager):
        self.queue, self.agent_loop_manager, self.global_steps = queue, manager, 3

    def _submit_batch_to_rollout(self, batch):
        for uid in batch["uid"]:
            self.queue.prompt(str(uid), "pending")
        self.agent_loop_manager.generate_sequences(batch)


def make_prompts(uids):
    from verl.utils import tensordict_utils as tu

    batch = tu.get_tensordict({"uid": list(uids), "raw_prompt": [[{"role": "user", "content": uid}] for uid in uids]})
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    return batch


@pytest.fixture
def run_of_four(queue, monkeypatch):
    """4 prompts x 2 on two workers; seven answers are there, and one worker will say nothing more."""
    manager = FakeManager(queue, ["worker0", "worker1"])
    trainer = FakeTrainer(queue, manager)
    manager.generate_sequences(make_prompts("abcd"))
    for uid in "abc":
        queue.prompt(uid, "finished", sessions=2)
    queue.prompt("d", "running", sessions=1)
    time = SimpleNamespace(now=0.0)
    dead = []
    monkeypatch.setattr(lost, "find_dead", lambda manager, wait_s=0.0: dead)

    def build(**settings):
        buffer = make_buffer(settings=Settings(**settings), clock=lambda: time.now)
        buffer._fl_trainer = trainer
        return buffer

    def look(buffer, seconds):
        for _ in range(int(seconds / 5)):
            time.now += 5.0
            buffer._sync_metadata_from_transfer_queue()

    return SimpleNamespace(queue=queue, manager=manager, build=build, look=look, dead=dead, time=time)


def test_a_lost_prompt_is_named_and_sent_again_once_the_limit_is_over(run_of_four, caplog):
    buffer = run_of_four.build(rollout__prompt_timeout_s=60.0)
    run_of_four.look(buffer, 60)
    assert run_of_four.manager.sent == [list("abcd")]
    run_of_four.look(buffer, 10)
    (first, (again,)) = run_of_four.manager.sent
    assert "rollout: no answer after 60 s: sent again: prompt d" in caplog.text
    assert not [key for key in run_of_four.queue.tags["train"] if key.startswith("d")]  # its half is gone
    assert buffer.pending_keys["train"] == {again}

    run_of_four.queue.prompt(again, "finished", sessions=2)
    batch, metrics = sample(buffer, 4)
    assert len(batch.keys) == 8
    assert metrics["training/rollout/lost_prompts"] == 1


def test_the_row_that_is_sent_again_is_the_lost_one_at_the_present_step(run_of_four):
    buffer = run_of_four.build(rollout__prompt_timeout_s=5.0)
    run_of_four.look(buffer, 15)
    (uid,) = run_of_four.manager.sent[1]
    prompts, row, _ = run_of_four.manager._fl_sent[uid]
    assert list(prompts["raw_prompt"])[row] == [{"role": "user", "content": "d"}]
    assert prompts["global_steps"] == 3


def test_a_prompt_that_is_lost_twice_is_dropped(run_of_four, caplog):
    buffer = run_of_four.build(rollout__prompt_timeout_s=5.0)
    run_of_four.look(buffer, 30)
    assert len(run_of_four.manager.sent) == 2
    assert "no answer after 5 s: dropped, and counted as failed: prompt " in caplog.text
    batch, metrics = sample(buffer, 4)
    assert len(batch.keys) == 6
    assert metrics["training/rollout/lost_prompts"] == 2
    assert metrics["training/rollout/failed_groups"] == 1


def test_on_lost_drop_takes_the_batch_without_it(run_of_four):
    buffer = run_of_four.build(rollout__prompt_timeout_s=5.0, rollout__on_lost="drop")
    run_of_four.look(buffer, 15)
    batch, metrics = sample(buffer, 4)
    assert run_of_four.manager.sent == [list("abcd")]
    assert len(batch.keys) == 7  # what the lost prompt had produced is padded by verl, as for any failed group
    assert metrics["training/rollout/lost_prompts"] == 1


def test_a_dead_worker_is_noticed_before_the_limit(run_of_four, caplog):
    buffer = run_of_four.build()
    run_of_four.look(buffer, 10)
    assert len(run_of_four.manager.sent) == 1
    run_of_four.dead.append("worker0")
    run_of_four.look(buffer, 5)
    assert len(run_of_four.manager.sent) == 1  # a and b went there, and both are finished
    run_of_four.dead.append("worker1")
    run_of_four.look(buffer, 5)
    assert "its agent-loop worker has died: sent again: prompt d" in caplog.text
    assert len(run_of_four.manager.sent) == 2


def test_zero_waits_for_ever_and_time_spent_training_does_not_count(run_of_four):
    buffer = run_of_four.build(rollout__prompt_timeout_s=0)
    run_of_four.look(buffer, 10_000)
    assert len(run_of_four.manager.sent) == 1
    buffer = run_of_four.build(rollout__prompt_timeout_s=60.0)
    run_of_four.look(buffer, 30)
    run_of_four.time.now += 3600.0
    run_of_four.look(buffer, 5)
    assert len(run_of_four.manager.sent) == 1


def test_dead_workers_get_no_more_prompts_and_none_left_is_an_error(monkeypatch, caplog):
    dead = ["worker0"]
    monkeypatch.setattr(lost, "find_dead", lambda manager, wait_s=0.0: dead)
    manager = SimpleNamespace(agent_loop_workers=["worker0", "worker1"])
    lost.drop_dead_workers(manager)
    assert manager.agent_loop_workers == ["worker1"]
    assert "1 of 2 agent-loop workers have died" in caplog.text
    dead.append("worker1")
    with pytest.raises(RuntimeError, match="every agent-loop worker has died"):
        lost.drop_dead_workers(manager)


# --- polling and metrics ---


def test_the_buffer_looks_ten_times_a_second_unless_a_look_is_dear(queue, monkeypatch):
    from verl.trainer.ppo.v1 import replay_buffer

    slept = []
    monkeypatch.setattr(replay_buffer.time, "sleep", slept.append)
    buffer = make_buffer()
    for cost in (0.001, 0.05, 10.0):
        buffer._fl_sync_s = cost
        buffer._wait_for_next_poll("train", replay_buffer.time.time())
    assert slept == [0.1, 0.5, 2.0]


def test_our_counts_are_summed_over_the_local_updates_of_a_step():
    from verl.trainer.ppo.v1.utils import MetricsAggregator

    aggregator = MetricsAggregator()
    for count in (1, 2):
        aggregator.add_step_metrics({f"training/{name}": count for name in METRICS}, sample_count=4)
    assert set(aggregator.get_aggregated_metrics().values()) == {3}


def test_the_error_line_counts_repeats_at_powers_of_ten(caplog):
    watch = Watch(Settings())
    with caplog.at_level(logging.ERROR):
        for number in range(120):
            watch.note("rollout", f"OSError: port {number}")
    assert [record.message.rpartition("(")[2] for record in caplog.records][1:] == [
        "10 times so far)",
        "100 times so far)",
    ]


def test_a_chunked_tensordict_is_remembered_row_by_row():
    batch = TensorDict({"dummy": torch.zeros(3, 1), "uid": NonTensorData("x")}, batch_size=3)
    assert len(batch.chunk(2)) == 2
    manager = SimpleNamespace(agent_loop_workers=["w0", "w1"])
    lost.remember(manager, make_prompts("abc"))
    assert {uid: worker for uid, (_, _, worker) in manager._fl_sent.items()} == {"a": "w0", "b": "w0", "c": "w1"}
