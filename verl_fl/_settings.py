"""The ``fl`` node of the config, read and checked in one place. Without the node every default below holds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from verl_fl._errors import explain

_LEVELS = ("error", "warn", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a run may ask of verl-fl's checks and limits; each field's name is its path under ``fl``."""

    checks__memory: str = "error"
    """What happens when model, gradients, optimizer and rollout do not fit into memory."""

    checks__data: str = "error"
    """What happens when a data file lacks what the trainer will ask of it."""

    checks__disk: str = "error"
    """What happens when the checkpoint folder can't hold a checkpoint."""

    reward__timeout_s: float = 60.0
    """Seconds that one call of a reward function may take."""

    reward__on_error: str = "count"
    """``count``: a failed call scores 0; ``raise``: it ends the run."""

    rollout__prompt_timeout_s: float = 1800.0
    """Seconds of waiting after which an unanswered prompt is lost; 0 waits for ever."""

    rollout__on_lost: str = "resend"
    """``resend``: a lost prompt is sent again, once; ``drop``: it is counted as failed."""

    def __post_init__(self) -> None:
        for name in ("checks__memory", "checks__data", "checks__disk"):
            _choice(name, getattr(self, name), _LEVELS)
        _choice("reward__on_error", self.reward__on_error, ("count", "raise"))
        _choice("rollout__on_lost", self.rollout__on_lost, ("resend", "drop"))
        _number("reward__timeout_s", self.reward__timeout_s, above_zero=True)
        _number("rollout__prompt_timeout_s", self.rollout__prompt_timeout_s, above_zero=False)


def select(config: Any, key: str, default: Any = None) -> Any:
    """``config``'s value at the dotted ``key``; ``default`` where it is absent, null or ``???``."""
    from omegaconf import OmegaConf

    config = OmegaConf.create(config) if isinstance(config, dict) else config
    value = OmegaConf.select(config, key, throw_on_missing=False)
    return default if value is None else value


def read_settings(config: Any) -> Settings:
    """Read ``fl`` of ``config`` (a DictConfig or None); what is absent or null has its default.

    Raises:
        ValueError: a value is none of the legal ones.
    """
    given = {} if config is None else {f.name: select(config, _key(f.name)) for f in fields(Settings)}
    # YAML reads a bare `off` as False.
    given = {name: "off" if value is False else value for name, value in given.items()}
    return Settings(**{name: value for name, value in given.items() if value is not None})


def _key(name: str) -> str:
    return "fl." + name.replace("__", ".")


def _choice(name: str, value: object, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ValueError(explain(f"{_key(name)} is none of its values", asked=repr(value), legal=", ".join(legal)))


def _number(name: str, value: object, *, above_zero: bool) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or value < 0 or (above_zero and value == 0):  # type: ignore[operator]
        legal = "seconds above 0" if above_zero else "seconds, or 0 to wait for ever"
        raise ValueError(explain(f"{_key(name)} is not a number of seconds", asked=repr(value), legal=legal))
