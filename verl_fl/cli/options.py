"""What a quickstart run was asked for, with a sane default for everything, checked before anything starts."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from verl_fl.cli._exit import UsageError, usage

ALGORITHMS = {
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "ppo": "gae",
}
"""The names of ``--algorithm`` and verl's ``algorithm.adv_estimator`` for each."""

DTYPES = ("float32", "bfloat16")
_DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16"}

OURS = {
    "trainer.logger": "the progress display reads verl's file logger",
    "trainer.default_local_dir": "checkpoints lie in the run folder (--out)",
    "trainer.total_training_steps": "use --steps",
    "trainer.resume_mode": "use --resume DIR",
    "ray_kwargs.ray_init._temp_dir": "a run has a Ray of its own, removed at its end",
    "ray_kwargs.ray_init.address": "a run has a Ray of its own, removed at its end",
}
"""Overrides that quickstart sets itself, and why the user can't."""

_OVERRIDE = re.compile(r"^(\+\+|\+|~)?[A-Za-z_][\w./@-]*(=.*)?$", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """One run. ``None`` in the first four means: made on the spot, or none."""

    model: str | None = None
    """A folder, a Hugging Face id or a .gguf file."""
    train: str | None = None
    """Absolute path of the prompts."""
    val: str | None = None
    """Absolute path of the validation prompts."""
    reward: str | None = None
    """Absolute path of a file with compute_score, or ``verl``."""
    out: str
    """Absolute path of the run folder."""
    steps: int
    batch: int
    """Prompts a step."""
    samples: int
    """Answers a prompt."""
    mini_batch: int
    """Prompts an update of the actor; divides ``batch``."""
    prompt_length: int
    response_length: int
    """Both in tokens, at most."""
    lr: float
    dtype: str
    algorithm: str
    seed: int
    save_every: int
    """Steps between checkpoints; 0 is never."""
    overrides: tuple[str, ...] = ()
    """Further overrides of verl's config, in order; the last one wins."""

    @property
    def is_toy(self) -> bool:
        """Whether model and data are both quickstart's own."""
        return self.model is None and self.train is None


_TOY = {"steps": 24, "batch": 16, "samples": 8, "prompt_length": 96, "response_length": 16, "lr": 3e-3}
_OWN = {"steps": 30, "batch": 8, "samples": 8, "prompt_length": 512, "response_length": 128, "lr": 1e-5}


def resolve(asked: dict[str, Any], overrides: list[str], default_out: Path) -> Options:
    """Fill in the defaults and check every value.

    Raises:
        UsageError: the first thing that is wrong, in four parts.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    own = "model" in given or "train" in given
    values: dict[str, Any] = {**(_OWN if own else _TOY), "algorithm": "grpo", "seed": 0, "save_every": 10}
    values["dtype"] = "bfloat16" if "model" in given else "float32"
    values |= given
    _check_together(values)
    for name in ("steps", "batch", "prompt_length", "response_length", "samples"):
        _check_at_least(name, values[name], 1)
    _check_at_least("save_every", values["save_every"], 0)
    _check_at_least("seed", values["seed"], 0)
    if not 0 < values["lr"] < 1:
        raise usage(
            f"--lr {values['lr']:g} can't train",
            asked=f"--lr {values['lr']:g}",
            legal="above 0, below 1",
            fix="1e-6 to 1e-5 for a pretrained model, 1e-3 to 1e-2 for the tiny one",
        )
    values["dtype"] = _DTYPE_ALIASES.get(values["dtype"], values["dtype"])
    _check_choice("dtype", values["dtype"], DTYPES)
    _check_choice("algorithm", values["algorithm"], tuple(ALGORITHMS))
    if values["algorithm"] in ("grpo", "rloo") and values["samples"] < 2:
        raise usage(
            f"{values['algorithm']} compares the answers to one prompt, so it needs more than one",
            asked=f"--samples {values['samples']}",
            legal="2 or more; reinforce_plus_plus and ppo take 1",
            fix="leave --samples out (8), or choose another --algorithm",
        )
    values["overrides"] = check_overrides(overrides)
    values["mini_batch"] = _mini_batch(values["batch"], toy=not own)
    values["out"] = str(_out(Path(values.get("out", default_out))))
    for name in ("train", "val"):
        if name in values:
            values[name] = str(Path(values[name]).expanduser().absolute())
    known = {field.name for field in fields(Options)}
    return Options(**{name: value for name, value in values.items() if name in known})


def check_overrides(overrides: list[str]) -> tuple[str, ...]:
    """Return them; raises UsageError for one that Hydra could not read or that quickstart sets itself."""
    for override in overrides:
        if not _OVERRIDE.match(override) or ("=" not in override and not override.startswith("~")):
            raise usage(
                f"{override!r} is not an override of verl's config",
                asked=override,
                legal="key=value, +key=value, ++key=value, ~key (Hydra's grammar)",
                fix="options start with --; see verl-fl quickstart --help",
            )
        key = override.lstrip("+~").partition("=")[0]
        if key in OURS:
            raise usage(
                f"quickstart sets {key} itself", asked=override, legal="every other key of verl's config", fix=OURS[key]
            )
        if key == "fl" and override.partition("=")[2] != "cpu":
            raise usage(
                "quickstart runs on the CPU",
                asked=override,
                legal="+fl=cpu, which it passes itself",
                fix="for another platform start verl itself: python -m verl.trainer.main_ppo +fl=NAME ...",
            )
    return tuple(override for override in overrides if override.lstrip("+") != "fl=cpu")


def _check_together(values: dict[str, Any]) -> None:
    if "train" in values and "reward" not in values:
        raise usage(
            "your prompts need your reward: the toy task's can't judge them",
            asked="--train without --reward",
            legal="--reward FILE.py (with compute_score), or --reward verl (verl's scorer for the data_source)",
            fix="add --reward",
        )
    for name in ("reward", "val"):
        if name in values and "train" not in values:
            raise usage(
                f"--{name} without --train",
                asked=f"--{name} {values[name]}",
                legal="--train FILE.parquet together with --reward and, if you like, --val",
                fix="add --train",
            )


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        option = "--" + name.replace("_", "-")
        raise usage(
            f"{option} {value} is too small",
            asked=f"{option} {value}",
            legal=f"{least} or more",
            fix=f"leave {option} out for its default",
        )


def _check_choice(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value in legal:
        return
    fix = "float16 has no fast CPU kernels; bfloat16 needs as little memory" if name == "dtype" else "use one of these"
    raise usage(f"unknown {name} {value!r}", asked=f"--{name} {value}", legal=", ".join(legal), fix=fix)


def _mini_batch(batch: int, *, toy: bool) -> int:
    """The toy takes several updates a step, because it starts from noise; a pretrained model takes one."""
    return max(size for size in range(1, 5) if batch % size == 0) if toy else batch


def _out(out: Path) -> Path:
    out = out.expanduser().absolute()
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise _not_empty(out)
    nearest = next(parent for parent in (out, *out.parents) if parent.exists())
    if not nearest.is_dir():
        raise usage(
            f"--out {out} can't be made",
            asked=f"--out {out}",
            found=f"{nearest} is a file",
            fix="name a folder that is new or empty",
        )
    return out


def _not_empty(out: Path) -> UsageError:
    resumable = (out / "run.json").is_file()
    return usage(
        f"the run folder {out} is in use",
        asked=f"--out {out}",
        found="an earlier run" if resumable else "a file of that name" if out.is_file() else "files in it",
        legal="a new or an empty folder",
        fix=f"verl-fl quickstart --resume {out} goes on with it; or name another" if resumable else "name another",
    )
