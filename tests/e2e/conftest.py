"""One real run of stock verl, with a Ray of its own."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile

import psutil
import pytest


@pytest.fixture(scope="session")
def toy_files(tmp_path_factory):
    from verl_fl.cli import toy

    folder = tmp_path_factory.mktemp("toy")
    toy.make_model(folder / "model", seed=0)
    toy.make_data(folder / "train.parquet", folder / "reward.py", seed=0)
    return folder


class Run:
    """One command of verl in a folder of its own, with a Ray of its own that ends with it."""

    def __init__(self, toy_files, folder, env):
        self.toy, self.folder, self.env = toy_files, folder, env
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
        env = {**self.env, "VERL_FILE_LOGGER_PATH": str(self.metrics), "HF_HUB_OFFLINE": "1"}
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
def training_run(toy_files, tmp_path):
    """Makes a run in an environment of its own; what it started ends with the test."""
    made = []

    def make(env):
        made.append(Run(toy_files, tmp_path, env))
        return made[-1]

    yield make
    for run in made:
        run.close()


@pytest.fixture
def run(training_run):
    return training_run(dict(os.environ))
