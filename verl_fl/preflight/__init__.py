"""What can be known before a model is loaded: every check here costs seconds and saves minutes.

:func:`check` runs on the driver, on the whole mutable config, before Ray starts.
"""

from __future__ import annotations

from typing import Any

from verl_fl._settings import read_settings

__all__ = ["check"]


def check(config: Any, *, use_reference: bool, use_critic: bool) -> None:
    """Check the run that ``config`` describes and fill in what verl-fl chooses. Idempotent.

    Raises:
        ValueError: the run can't work as asked; one message with what to do.
        RuntimeError: the machine lacks what the run needs.
    """
    from verl_fl.preflight import capacity, cluster, data, engine, model, reward

    settings = read_settings(config)
    engine.choose_engines(config, use_reference=use_reference, use_critic=use_critic)
    folder = model.find_model(config)
    tokenizer = model.load_tokenizer(config, folder)
    data.check_data(config, tokenizer, settings)
    reward.check_reward(config)
    cluster.plan_ray(config)
    capacity.check_memory(config, folder, settings, use_reference=use_reference, use_critic=use_critic)
    capacity.check_disk(config, folder, settings, use_critic=use_critic)
