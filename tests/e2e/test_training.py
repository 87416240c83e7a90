"""Stock verl's own command, `python -m verl.trainer.main_ppo +fl=cpu`, with real Ray on the tiny model."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

pytestmark = pytest.mark.timeout(900)

DIFFERENCE = "training/rollout_log_probs_diff/mean"


@pytest.fixture(scope="module")
def toy_files(tmp_path_factory):
    from verl_fl.cli import toy

    folder = tmp_path_factory.mktemp("toy")
    toy.make_model(folder / "model", seed=0)
    toy.make_data(folder / "train.parquet", folder / "reward.py", seed=0)
    return folder


class Run:
    """One command of verl in a folder of its own, with a Ray of its own that ends with it."""

    def __init__(self, toy_files, folder):
        self.toy, self.folder = toy_files, folder
        self.metrics, self.log = folder / "metrics.jsonl", folder / "run.log"
        self.ray_dir = tempfile.mkdtemp(prefix="vflt-", dir="/tmp")

    def start(self, *overrides):
        command = [
            sys.executable, "-m", "verl.trainer.main_ppo", "+fl=cpu", "algorithm.adv_estimator=grpo",
            f"data.train_files={self.toy}/train.parquet", f"data.val_files={self.toy}/train.parquet",
            "data.train_batch_size=8", "data.max_prompt_length=64", "data.max_response_length=8",
            f"actor_rollout_ref.model.path={self.toy}/model", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.rollout.n=4",
            f"reward.custom_reward_function.path={self.toy}/reward.py", "trainer.total_training_steps=2",
            "trainer.logger=[console,file]", f"trainer.default_local_dir={self.folder}/checkpoints",
            f"hydra.run.dir={self.folder}/hydra", "+ray_kwargs.ray_init.address=local",
            f"+ray_kwargs.ray_init._temp_dir={self.ray_dir}", *overrides,
        ]  # fmt: skip
        env = {**os.environ, "VERL_FILE_LOGGER_PATH": str(self.metrics), "HF_HUB_OFFLINE": "1"}
        with open(self.log, "w") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=self.folder, start_new_session=True)

    def steps(self, *overrides):
        """Run to the end; each step's metrics, by step."""
        code = self.start(*overrides).wait()
        log = self.log.read_text(errors="replace")
        assert code == 0, log[-4000:]
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]
        return self.logged()

    def logged(self):
        rows = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        return {row["step"]: row["data"] for row in rows}

    def close(self):
        for process in psutil.process_iter(["cmdline"]):
            if any(self.ray_dir in part for part in process.info["cmdline"] or []):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        shutil.rmtree(self.ray_dir, ignore_errors=True)


@pytest.fixture
def run(toy_files, tmp_path):
    made = Run(toy_files, tmp_path)
    yield made
    made.close()


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
