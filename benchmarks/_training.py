"""A GRPO run of stock verl with verl-fl on arithmetic questions, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from _arithmetic import questions

HERE = Path(__file__).resolve().parent


def train(
    model: str,
    folder: Path,
    *,
    steps: int,
    prompts: int,
    samples: int,
    new_tokens: int,
    overrides: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Run ``verl.trainer.main_ppo +fl=cpu`` in ``folder`` and return each step's metrics.

    Exits with the end of verl's log if the run fails.
    """
    data = write_data(folder, prompts * steps)
    metrics, log = folder / "metrics.jsonl", folder / "verl.log"
    command = [
        sys.executable, "-m", "verl.trainer.main_ppo", "+fl=cpu", "algorithm.adv_estimator=grpo",
        f"data.train_files={data}", f"data.val_files={data}", f"data.train_batch_size={prompts}", "data.shuffle=false",
        "data.max_prompt_length=64", f"data.max_response_length={new_tokens}",
        f"actor_rollout_ref.model.path={model}", f"actor_rollout_ref.rollout.n={samples}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        f"reward.custom_reward_function.path={HERE}/_arithmetic.py",
        f"trainer.total_training_steps={steps}", "trainer.total_epochs=1", "trainer.logger=[file]",
        f"trainer.default_local_dir={folder}/checkpoints", "trainer.resume_mode=disable",
        f"hydra.run.dir={folder}/hydra", *overrides,
    ]  # fmt: skip
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VERL_FILE_LOGGER_PATH": str(metrics)}
    with open(log, "w") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=folder).returncode
    if code or not metrics.exists():
        sys.exit(f"verl ended with {code}:\n" + "\n".join(log.read_text().splitlines()[-30:]))
    return [json.loads(line)["data"] for line in metrics.read_text().splitlines()]


def write_data(folder: Path, count: int) -> Path:
    """A parquet file of ``count`` questions in verl's format."""
    import pandas as pd

    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index},
        }
        for index, (question, answer) in enumerate(questions(count))
    ]
    path = folder / "train.parquet"
    pd.DataFrame(rows).to_parquet(path)
    return path


def hf_folder(model: str, folder: Path) -> str:
    """``model`` itself, or, for a .gguf file, a Hugging Face folder made of it."""
    if not model.endswith(".gguf"):
        return os.path.abspath(model)
    from _common import load_model, load_tokenizer

    path = folder / "model"
    if not path.exists():
        load_model(model, "bfloat16").save_pretrained(path)
        load_tokenizer(model).save_pretrained(path)
    return str(path)
