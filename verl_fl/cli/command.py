"""The options of a run as the command line of stock verl: nothing here that a user could not type."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from verl_fl.cli.options import ALGORITHMS, Options

MODULE = "verl.trainer.main_ppo"
_PLAIN = re.compile(r"^[A-Za-z_/][\w./-]*$")


def command(options: Options, *, model: str, train: str, reward: str | None, ray_dir: str, resume: bool) -> list[str]:
    """Return the command; ``model``, ``train`` and ``reward`` are local paths by now."""
    return [sys.executable, "-m", MODULE, "+fl=cpu", *overrides(options, model, train, reward, ray_dir, resume)]


def overrides(
    options: Options, model: str, train: str, reward: str | None, ray_dir: str, resume: bool = False
) -> list[str]:
    """Return verl's overrides in Hydra's grammar, the user's own last, so that they win."""
    out = Path(options.out)
    settings: dict[str, object] = {
        "algorithm.adv_estimator": ALGORITHMS[options.algorithm],
        "data.train_files": train,
        "data.val_files": options.val or train,
        "data.train_batch_size": options.batch,
        "data.max_prompt_length": options.prompt_length,
        "data.max_response_length": options.response_length,
        "data.filter_overlong_prompts": True,
        "data.seed": options.seed,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.optim.lr": options.lr,
        "actor_rollout_ref.actor.ppo_mini_batch_size": options.mini_batch,
        "actor_rollout_ref.actor.data_loader_seed": options.seed,
        "actor_rollout_ref.actor.fsdp_config.seed": options.seed,
        "actor_rollout_ref.rollout.dtype": options.dtype,
        "actor_rollout_ref.rollout.seed": options.seed,
        "actor_rollout_ref.rollout.n": options.samples,
        "trainer.total_training_steps": options.steps,
        # verl drops the last, incomplete batch of an epoch; an epoch has at least one step.
        "trainer.total_epochs": options.steps,
        "trainer.logger": ["console", "file"],
        "trainer.project_name": "verl-fl",
        "trainer.experiment_name": out.name,
        "trainer.default_local_dir": out / "checkpoints",
        "trainer.save_freq": options.save_every or -1,
        # Two: with one, verl removes the last whole checkpoint before the next one is.
        "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.max_critic_ckpt_to_keep": 2,
        "trainer.resume_mode": "auto" if resume else "disable",
        # The last step validates too; -1 is never.
        "trainer.test_freq": options.steps if options.val else -1,
        "+ray_kwargs.ray_init.address": "local",
        "+ray_kwargs.ray_init._temp_dir": ray_dir,
        "hydra.run.dir": out / "hydra",
    }
    if reward is not None:
        settings["reward.custom_reward_function.path"] = reward
    engines = ["actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config"]
    if options.algorithm == "ppo":
        settings |= {"critic.model.path": model, "critic.optim.lr": options.lr}
        engines.append("critic.fsdp")
    # Without it verl's FSDP engine computes in bfloat16 whatever fsdp_config.dtype says.
    precision = {"float32": "fp32", "bfloat16": "bf16"}[options.dtype]
    settings |= {f"+{engine}.mixed_precision.param_dtype": precision for engine in engines}
    return [f"{key}={_quote(value)}" for key, value in settings.items()] + list(options.overrides)


def _quote(value: object) -> str:
    """The value as Hydra reads it back: paths and words in quotes, since they may hold what its grammar uses."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    text = str(value)
    if _PLAIN.match(text) and text not in ("null", "true", "false"):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
