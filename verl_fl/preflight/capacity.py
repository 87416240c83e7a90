"""Whether the model fits into memory and its checkpoints onto the disk, from the sizes in file headers alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from verl_fl import _verl
from verl_fl._errors import explain
from verl_fl._settings import Settings, select
from verl_fl.checkpoints import existing, free_bytes
from verl_fl.preflight._report import gigabytes, report
from verl_fl.preflight.cluster import is_remote
from verl_fl.preflight.model import count_parameters, find_model, read_config

_PER_PROCESS = 0.3e9  # private memory of a Python process that has imported torch and verl
_BYTES = {"fp32": 4, "float32": 4, "float": 4, "float64": 8}


def check_memory(
    config: Any, folder: Path | None, settings: Settings, *, use_reference: bool, use_critic: bool
) -> None:
    """Compare :func:`memory_parts` with what is free, where trainer and rollout share this host's memory."""
    if settings.checks__memory == "off" or folder is None or not _shares_host(config):
        return
    parts = memory_parts(config, folder, use_reference=use_reference, use_critic=use_critic)
    available = _verl.current_platform().device_module.mem_get_info()[0]
    need = sum(parts.values())
    if need > available:
        report(
            settings.checks__memory,
            _too_big(folder, parts, need, available),
            key="fl.checks.memory",
            error=RuntimeError,
        )


def _shares_host(config: Any) -> bool:
    on_host = _verl.on_our_platform() and _verl.current_platform().device_name == "cpu"
    return on_host and int(select(config, "trainer.nnodes", 1)) == 1 and not is_remote(config)


def memory_parts(config: Any, folder: Path, *, use_reference: bool, use_critic: bool) -> dict[str, float]:
    """Bytes by purpose. FSDP shards the trainer's part, so it counts once; each rollout replica holds a copy."""
    count = count_parameters(folder) or 0
    trainable = 0 if _is_lora(config) else count
    replicas, rollout_bytes = _replicas(config), _BYTES.get(str(select(config, f"{_ROLLOUT}.dtype", "bfloat16")), 2)
    master = _BYTES.get(str(select(config, "actor_rollout_ref.actor.fsdp_config.model_dtype", "fp32")), 2)
    parts = {
        "parameters": float(master * count),
        "gradients": float(master * trainable),
        "optimizer (two moments)": float(2 * master * trainable),
        f"rollout ({replicas} x {rollout_bytes} bytes)": float(replicas * rollout_bytes * count),
    }
    if use_reference and not _is_lora(config):
        parts["reference"] = 4.0 * count
    if use_critic:
        parts["critic with gradients and optimizer"] = 16.0 * (_critic_parameters(config) or count)
    parts["logits of one micro-batch"] = _logits_bytes(config, folder)
    workers = int(select(config, "trainer.n_gpus_per_node", 1))
    helpers = sum(int(select(config, key, 1)) for key in ("reward.num_workers", f"{_ROLLOUT}.agent.num_workers"))
    processes = 4 + workers + replicas + helpers
    parts[f"{processes} Python processes"] = processes * _PER_PROCESS
    return parts


_ROLLOUT = "actor_rollout_ref.rollout"


def _is_lora(config: Any) -> bool:
    model = "actor_rollout_ref.model"
    ranks = (select(config, f"{model}.lora_rank", 0), select(config, f"{model}.lora.rank", 0))
    return any(int(rank) > 0 for rank in ranks) or select(config, f"{model}.lora_adapter_path") is not None


def _replicas(config: Any) -> int:
    size = int(select(config, f"{_ROLLOUT}.tensor_model_parallel_size", 1))
    workers = int(select(config, "trainer.nnodes", 1)) * int(select(config, "trainer.n_gpus_per_node", 1))
    hybrid = bool(select(config, "actor_rollout_ref.hybrid_engine", True))
    replicas = workers // max(size, 1) if hybrid else 0
    if select(config, "trainer.v1.trainer_mode") == "separate_async":
        own = int(select(config, f"{_ROLLOUT}.nnodes", 0)) * int(select(config, f"{_ROLLOUT}.n_gpus_per_node", 0))
        replicas += own // max(size, 1)
    return max(replicas, 1)


def _critic_parameters(config: Any) -> int | None:
    try:
        folder = find_model(config, "critic.model.path")
    except ValueError:
        return None
    return count_parameters(folder) if folder else None


def _logits_bytes(config: Any, folder: Path) -> float:
    """Logits and their gradient, fp32, for the tokens of one micro-batch."""
    model = read_config(folder)
    vocabulary = int(model.get("vocab_size") or model.get("text_config", {}).get("vocab_size") or 0)
    lengths = ("data.max_prompt_length", "data.max_response_length")
    per_sample = sum(int(select(config, key, 512)) for key in lengths)
    samples = int(select(config, "data.train_batch_size", 1)) * int(select(config, f"{_ROLLOUT}.n", 1))
    most = samples * per_sample
    if select(config, "actor_rollout_ref.actor.use_dynamic_bsz", False):
        limit = int(select(config, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", most))
    else:
        limit = int(select(config, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 1)) * per_sample
    return 2.0 * 4 * min(most, limit) * vocabulary


def _too_big(folder: Path, parts: dict[str, float], need: float, available: int) -> str:
    width = max(len(name) for name in parts)
    table = "\n".join(f"    {name:<{width}}  {gigabytes(size):>9}" for name, size in parts.items() if size)
    return explain(
        f"the run needs about {gigabytes(need)} of memory, and {gigabytes(available)} are free",
        asked=f"{folder}, {count_parameters(folder):,} parameters\n{table}",
        fix="take a smaller model, train a LoRA (actor_rollout_ref.model.lora_rank=16), or lower "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu; close other programs",
    )


def check_disk(config: Any, folder: Path | None, settings: Settings, *, use_critic: bool) -> None:
    """Check that ``trainer.default_local_dir`` can be written and has room for a checkpoint; under three, warn."""
    if settings.checks__disk == "off" or int(select(config, "trainer.save_freq", -1)) <= 0 or is_remote(config):
        return
    root = Path(str(select(config, "trainer.default_local_dir", "checkpoints")))
    parent = existing(root)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        problem = explain(
            "the checkpoint folder can't be written",
            asked=f"trainer.default_local_dir={root}, trainer.save_freq={config.trainer.save_freq}",
            found=f"{parent} is " + ("not writable for this user" if parent.is_dir() else "a file"),
            fix="set trainer.default_local_dir to a folder of yours, or trainer.save_freq=-1",
        )
        return report(settings.checks__disk, problem, key="fl.checks.disk", error=RuntimeError)
    need, free = checkpoint_bytes(config, folder, use_critic=use_critic), free_bytes(root)
    if free < 3 * need:
        level = settings.checks__disk if free < need else "warn"
        report(level, _little_space(config, root, need, free), key="fl.checks.disk", error=RuntimeError)


def checkpoint_bytes(config: Any, folder: Path | None, *, use_critic: bool) -> int:
    """About one checkpoint: parameters and both moments, four bytes each; 0 where the model isn't known yet."""
    count = (count_parameters(folder) or 0) if folder else 0
    actor = (4 if _is_lora(config) else 12) * count
    return actor + (12 * (_critic_parameters(config) or count) if use_critic else 0)


def _little_space(config: Any, root: Path, need: int, free: int) -> str:
    return explain(
        "the disk holds less than one checkpoint" if free < need else "the disk holds few checkpoints",
        asked=f"{gigabytes(need)} each, every {config.trainer.save_freq} steps, in {root}",
        found=f"{gigabytes(free)} free at {existing(root)}",
        fix="move trainer.default_local_dir, set trainer.max_actor_ckpt_to_keep=1, or trainer.save_freq=-1",
    )
