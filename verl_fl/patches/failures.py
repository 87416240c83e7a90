"""Failures of a rollout reach the screen: the cause travels in the prompt's tag, and the trainer reads it there."""

from __future__ import annotations

import contextvars
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from verl_fl.patches.ledger import patch

logger = logging.getLogger("verl_fl.rollout")

_SHORTEST_POLL_S = 0.1
# The prompt that the running task serves: uid, partition, session. Each session is a task of its own.
_SESSION: contextvars.ContextVar[tuple[str, str, int] | None] = contextvars.ContextVar("verl_fl_session", default=None)


# --- in the agent-loop worker -----------------------------------------------------------------------------------


@patch(
    target="verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop",
    why="an exception in an agent loop or a reward reaches the user as 'no materializable trajectories', and its cause "
    "stays in a worker's log",
    reference="notes/verl-0.9.1.md section 0; verl/trainer/ppo/v1/agent_loop_tq.py _run_prompt",
    remove_when="verl hands the cause of a failed group to the trainer",
)
def failure_in_tag(original: Callable) -> Callable:
    @functools.wraps(original)
    async def _run_agent_loop(self: Any, sampling_params: Any, trajectory: Any, *args: Any, **kwargs: Any) -> Any:
        uid, session = kwargs.get("uid"), kwargs.get("session_id")
        if uid is None or session is None:  # the v0 trainer, which has no TransferQueue and raises by itself
            return await original(self, sampling_params, trajectory, *args, **kwargs)
        _SESSION.set((uid, "val" if trajectory["validate"] else "train", session))
        try:
            return await original(self, sampling_params, trajectory, *args, **kwargs)
        except Exception as error:
            from verl_fl.rollout.watch import ERROR, FATAL

            cause = getattr(error, "cause", None) or error  # Ray wraps what an actor raised
            fatal = type(cause).__name__ == "RewardFailed"
            await _publish(FATAL if fatal else ERROR, str(cause) if fatal else short(error))
            raise

    return _run_agent_loop


@patch(
    target="verl.experimental.agent_loop.agent_loop:AgentLoopWorker._compute_score",
    why="a failed reward call has no way to the trainer's screen, and an answer without tokens raises IndexError, "
    "because its score has no token to stand on",
    reference="cases slow-reward and empty-answer; verl/experimental/agent_loop/agent_loop.py as_dict",
    remove_when="verl counts failed rewards and accepts empty answers",
)
def score_in_tag(original: Callable) -> Callable:
    @functools.wraps(original)
    async def _compute_score(self: Any, outputs: list[Any], kwargs: dict) -> None:
        from verl_fl.reward.guard import REASON
        from verl_fl.rollout.watch import EMPTY, REWARD

        await original(self, outputs, kwargs=kwargs)
        reason = (outputs[-1].extra_fields.get("reward_extra_info") or {}).pop(REASON, None)
        if reason is not None:
            await _publish(REWARD, reason)
        if not outputs[-1].response_ids:
            await _publish(EMPTY, "empty answer")
        for output in outputs:
            fill_empty(output, self.tokenizer.pad_token_id)

    return _compute_score


def fill_empty(output: Any, pad_token_id: int | None) -> None:
    """Give an answer without tokens one padding token that is masked out: it carries the score and teaches nothing."""
    if output.response_ids:
        return
    output.response_ids, output.response_mask = [pad_token_id or 0], [0]
    if output.response_logprobs is not None:
        output.response_logprobs = [0.0]


async def _publish(prefix: str, text: str) -> None:
    session = _SESSION.get()
    if session is None:
        return
    import transfer_queue as tq

    uid, partition, number = session
    try:
        await tq.async_kv_put(key=uid, partition_id=partition, tag={f"{prefix}{number}": text})
    except Exception as error:  # the failure itself is about to be raised, and matters more
        logger.error("rollout: could not report %r of prompt %s: %s", text, uid, error)


def short(error: BaseException) -> str:
    """Type, message and the innermost frame of the user's own code, in one line."""
    import re
    import traceback

    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    cause = getattr(error, "cause", None)
    if cause is not None:  # from another process: the frames are text
        frames += [(name, int(line)) for name, line in re.findall(r'File "([^"]+)", line (\d+)', str(error))]
        error = cause
    own = [frame for frame in frames if "site-packages" not in frame[0] and not re.search(r"/lib/python3", frame[0])]
    text = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {text}" + "".join(f" ({name}:{line})" for name, line in (own or frames)[-1:])


# --- in the trainer ---------------------------------------------------------------------------------------------


@patch(
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._build_replay_buffer",
    why="the replay buffer knows neither the config nor the workers, so it can't limit a wait or send a prompt again",
    reference="case lost-rollout",
    remove_when="failure-watch is removed",
)
def watched_buffer(original: Callable) -> Callable:
    @functools.wraps(original)
    def _build_replay_buffer(self: Any) -> Any:
        from verl_fl._settings import read_settings
        from verl_fl.rollout.watch import Watch

        buffer = original(self)
        buffer._fl_watch = Watch(read_settings(self.config), batch_size=int(self.config.data.train_batch_size))
        buffer._fl_trainer = self
        return buffer

    return _build_replay_buffer


def watch_of(buffer: Any) -> Any:
    """The buffer's watch, made with the defaults where the trainer did not attach one."""
    if getattr(buffer, "_fl_watch", None) is None:
        from verl_fl._settings import Settings
        from verl_fl.rollout.watch import Watch

        buffer._fl_watch = Watch(Settings())
    return buffer._fl_watch


@patch(
    target="verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._sync_metadata_from_transfer_queue",
    why="the trainer learns that a prompt has failed, not why, and waits for ever for one whose worker has died",
    reference="cases lost-rollout and slow-reward; verl/trainer/ppo/v1/replay_buffer.py",
    remove_when="verl reports failed groups with their cause and limits the wait for a prompt",
)
def failure_watch(original: Callable) -> Callable:
    @functools.wraps(original)
    def _sync_metadata_from_transfer_queue(self: Any) -> None:
        from verl_fl.rollout import lost

        start = time.monotonic()
        original(self)
        self._fl_sync_s = time.monotonic() - start
        watch = watch_of(self)
        for partition in {*self.failure_keys, *self.finished_keys}:
            _note_failures(self, watch, partition)
        if lost.handle(self, watch, getattr(self, "_fl_trainer", None)):
            original(self)

    return _sync_metadata_from_transfer_queue


def _note_failures(buffer: Any, watch: Any, partition: str) -> None:
    finished, failed = set(buffer.finished_keys[partition]), set(buffer.failure_keys[partition])
    watch.keep(partition, finished | failed)
    fresh = watch.fresh(partition, failed)
    if fresh:
        tags = tags_of(partition)
        for uid in sorted(fresh):
            watch.failed(partition, uid, tags.get(uid, {}))
    if watch.fresh(partition, finished):
        watch.succeeded()


def tags_of(partition: str) -> dict[str, dict[str, Any]]:
    """All tags of the partition, by key."""
    from verl.trainer.ppo.v1 import replay_buffer

    return (replay_buffer.tq.kv_list(partition) or {}).get(partition, {})


@patch(
    target="verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._select_prompt_uids",
    why="failed rewards and empty answers stand in the prompts' tags, which verl clears when it takes the batch",
    reference="cases slow-reward and empty-answer",
    remove_when="failure-watch is removed",
)
def batch_watch(original: Callable) -> Callable:
    @functools.wraps(original)
    def _select_prompt_uids(self: Any, partition_id: str, *args: Any, **kwargs: Any) -> Any:
        selection = original(self, partition_id, *args, **kwargs)
        uids, snapshot = set(selection[0]), selection[1]
        sessions = {key.rsplit("_", 1)[0] for key in snapshot if key.split("_")[0] in uids}
        tags = tags_of(partition_id)
        watch_of(self).read_batch(partition_id, [tags.get(uid, {}) for uid in uids], len(sessions))
        return selection

    return _select_prompt_uids


@patch(
    target="verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._evict_terminal_groups",
    why="the async samplers replace failed prompts for ever when every prompt fails",
    reference="verl/trainer/ppo/v1/replay_buffer.py wait_for_sampleable",
    remove_when="verl limits the failures in a row",
)
def failure_streak(original: Callable) -> Callable:
    @functools.wraps(original)
    def _evict_terminal_groups(self: Any, global_steps: int, partition_id: str, eviction_reasons: tuple) -> Any:
        if eviction_reasons[2]:
            watch_of(self).check_streak()
        return original(self, global_steps, partition_id, eviction_reasons)

    return _evict_terminal_groups


def _with_causes(original: Callable) -> Callable:
    @functools.wraps(original)
    def sample(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict]:
        watch = watch_of(self)
        try:
            batch, metrics = original(self, *args, **kwargs)
        except RuntimeError as error:
            if "no materializable trajectories" not in str(error):
                raise
            raise RuntimeError(watch.nothing_left("every prompt of the batch failed")) from error
        if not batch.keys:
            raise RuntimeError(watch.nothing_left(f"every prompt of the {batch.partition_id} batch failed"))
        prefix = "validation" if batch.partition_id == "val" else "training"
        counts = watch.take_metrics(batch.partition_id)
        return batch, metrics | {f"{prefix}/{name}": count for name, count in counts.items()}

    return sample


@patch(
    target="verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.sample",
    why="a batch in which every prompt failed raises 'no materializable trajectories', or none at all in validation",
    reference="notes/verl-0.9.1.md section 0",
    remove_when="verl names the causes of the failed prompts",
)
def sample_with_causes(original: Callable) -> Callable:
    return _with_causes(original)


@patch(
    target="verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync.sample",
    why="the async twin of sample-with-causes",
    reference="notes/verl-0.9.1.md section 0",
    remove_when="verl names the causes of the failed prompts",
)
def sample_with_causes_async(original: Callable) -> Callable:
    return _with_causes(original)


@patch(
    target="verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._wait_for_next_poll",
    why="the buffer looks for finished prompts every 2 s, which is as long as a whole step of a small model on a CPU",
    reference="notes/verl-0.9.1.md section 0: timing_s/gen is a multiple of 2 s",
    remove_when="verl waits on an event, or makes the interval a setting",
)
def short_poll(original: Callable) -> Callable:
    @functools.wraps(original)
    def _wait_for_next_poll(self: Any, partition_id: str, last_debug_time: float) -> float:
        # A look costs time in proportion to the keys; a tenth of the time is spent on it at most.
        longest = self.__dict__.setdefault("_fl_longest_poll_s", self.poll_interval)
        self.poll_interval = min(longest, max(_SHORTEST_POLL_S, 10 * getattr(self, "_fl_sync_s", 0.0)))
        return original(self, partition_id, last_debug_time)

    return _wait_for_next_poll


@patch(
    target="verl.trainer.ppo.v1.utils:MetricsAggregator._init_aggregation_rules",
    why="a metric that verl does not know is averaged over the local updates of a step; our counts are sums",
    reference="verl/trainer/ppo/v1/utils.py",
    remove_when="failure-watch is removed",
)
def summed_counts(original: Callable) -> Callable:
    @functools.wraps(original)
    def _init_aggregation_rules(self: Any) -> dict[str, list[str]]:
        from verl_fl.rollout.watch import METRICS

        rules = original(self)
        rules["sum"] += [f"training/{name}" for name in METRICS]
        return rules

    return _init_aggregation_rules


@patch(
    target="verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.generate_sequences",
    why="a prompt whose worker has died can be sent again only if someone has kept it, and verl goes on dispatching "
    "to dead workers",
    reference="case lost-rollout; verl/trainer/ppo/v1/agent_loop_tq.py",
    remove_when="verl dispatches to live workers and sends lost prompts again",
)
def remembered_prompts(original: Callable) -> Callable:
    @functools.wraps(original)
    def generate_sequences(self: Any, prompts: Any) -> None:
        from verl_fl.rollout import lost

        lost.drop_dead_workers(self)
        lost.remember(self, prompts)
        return original(self, prompts)

    return generate_sequences
