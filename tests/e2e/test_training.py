"""Stock verl's own command, `python -m verl.trainer.main_ppo +fl=cpu`, with real Ray on the tiny model."""

import os
import signal
import time

import pytest

pytestmark = pytest.mark.timeout(900)

DIFFERENCE = "training/rollout_log_probs_diff/mean"


def test_ppo_with_a_critic_and_a_reference_on_two_workers_with_packed_rows(run):
    steps = run.steps(
        "algorithm.adv_estimator=gae",
        f"critic.model.path={run.toy}/model",
        "critic.optim.lr=1e-3",
        "critic.ppo_mini_batch_size=8",
        "critic.model.use_remove_padding=true",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.model.use_remove_padding=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
        "trainer.n_gpus_per_node=2",
    )
    assert steps[2]["critic/vf_loss"] > 0 and steps[2]["actor/kl_loss"] >= 0
    assert steps[2][DIFFERENCE] < 2e-2
    assert "attn_implementation=sdpa" in run.log.read_text()


def test_separate_async_with_two_updates_a_sync_in_fp32(run):
    """The rollout's weights are those of the last sync, so the first update of each cycle agrees with them."""
    steps = run.steps(
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.nnodes=1",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.v1.separate_async.num_warmup_batches=0",
        "actor_rollout_ref.rollout.dtype=float32",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    )
    # Both updates of a cycle compute old log-probs with the weights of its start, which the rollout had.
    assert steps[2][DIFFERENCE] < 1e-4
    assert steps[2]["weight_sync/bytes"] > 100_000


def test_lora_with_rloo_agrees_with_the_rollout_after_an_update(run):
    steps = run.steps(
        "algorithm.adv_estimator=rloo",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.lora_alpha=8",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.total_training_steps=3",
        "actor_rollout_ref.rollout.dtype=float32",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    )
    assert steps[3][DIFFERENCE] < 1e-4
    assert steps[3]["actor/kl_loss"] > 0, "the adapter changed nothing, so agreement proves nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [["lora=adapter"], ["lora=merged"], ["lora=adapter", "delta=true", "on_failure=old"]]
)
def test_lora_in_separate_async_agrees_with_the_rollout_after_every_sync(run, settings):
    """Merged weights are exported by verl in bfloat16, so they agree only to its rounding."""
    kwargs = "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.fl"
    steps = run.steps(
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.nnodes=1",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.v1.separate_async.num_warmup_batches=0",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.lora_alpha=8",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.total_training_steps=3",
        "actor_rollout_ref.rollout.dtype=float32",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
        *(f"{kwargs}.{setting}" for setting in settings),
    )
    assert steps[3][DIFFERENCE] < (2e-2 if "lora=merged" in settings else 1e-4)
    assert steps[3]["weight_sync/bytes"] > 0


def test_reinforce_plus_plus_in_colocate_async_with_strategy_fsdp(run):
    steps = run.steps(
        "algorithm.adv_estimator=reinforce_plus_plus",
        "trainer.v1.trainer_mode=colocate_async",
        "actor_rollout_ref.actor.strategy=fsdp",
        "actor_rollout_ref.ref.strategy=fsdp",
        "critic.strategy=fsdp",
    )
    assert set(steps) == {1, 2}
    assert "strategy=fsdp" in run.log.read_text()


def test_a_killed_run_resumes_from_its_last_complete_checkpoint(run):
    process = run.start("trainer.total_training_steps=12", "trainer.save_freq=2", "trainer.total_epochs=9")
    deadline = time.monotonic() + 500
    while not (run.metrics.exists() and 6 in run.logged()):  # step 7 has begun
        assert process.poll() is None, run.log.read_text(errors="replace")[-3000:]
        assert time.monotonic() < deadline, "step 6 was not reached"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run.close()
    os.makedirs(run.ray_dir)

    checkpoints = run.folder / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "6"
    newest = checkpoints / "global_step_6" / "actor" / "model_world_size_1_rank_0.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])  # as if it had been killed while saving
    run.metrics.rename(run.folder / "before.jsonl")

    steps = run.steps("trainer.total_training_steps=12", "trainer.save_freq=2", "trainer.total_epochs=9")
    assert sorted(steps) == list(range(5, 13)), "it did not go on from step 4"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert "global_step_6" in run.log.read_text() and "half-written" in run.log.read_text()
