"""The attention kernel: the user's override reaches every model, and a default the platform has stands in for none."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from verl_fl import _verl
from verl_fl._errors import explain
from verl_fl.patches.ledger import patch

logger = logging.getLogger("verl_fl.engine")


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("engine: attn_implementation=sdpa, verl's default flash_attention_2 is not here (%s)", reason)


def choose_attention(override: str | None) -> str:
    """The attention to load a model with: the user's, else flash_attention_2 where it works, else sdpa.

    Raises:
        ValueError: the user asked for flash_attention_2 where it can't run.
    """
    supported, reason = _verl.supports("flash_attention_2")
    if override is None:
        if not supported:
            _warn_once(reason)
        return "flash_attention_2" if supported else "sdpa"
    if override.startswith("flash_attention") and not supported:
        raise ValueError(
            explain(
                f"attention {override!r} can't run on this platform",
                asked=f"model.override_config.attn_implementation={override}",
                found=reason,
                legal="sdpa, eager",
                fix="drop the override: sdpa is the default here",
            )
        )
    return override


@patch(
    target="verl.workers.config.model:HFModelConfig.__post_init__",
    why="verl loads every model with flash_attention_2 unless it is told otherwise, and the package is CUDA's",
    reference="case critic-attention; verl/workers/config/model.py",
    remove_when="verl asks the platform for its default attention",
)
def attention_default(original: Callable) -> Callable:
    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        override = self.override_config
        chosen = choose_attention(override.get("attn_implementation"))
        if "attn_implementation" not in override:
            object.__setattr__(self, "override_config", {**override, "attn_implementation": chosen})
        original(self)

    return __post_init__


@patch(
    target="verl.utils.model:load_valuehead_model",
    why="verl loads the critic with a hard-coded flash_attention_2, whatever override_config says, and then reports "
    "that trl is missing instead of the real cause",
    reference="case critic-attention; verl/utils/model.py",
    remove_when="load_valuehead_model takes the attention of its model_config",
)
def critic_attention(original: Callable) -> Callable:
    @functools.wraps(original)
    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        chosen = getattr(model_config, "_attn_implementation", None) or choose_attention(None)
        if chosen == "flash_attention_2" or type(model_config) not in AutoModelForTokenClassification._model_mapping:
            return original(local_path, torch_dtype, model_config, trust_remote_code)
        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation=chosen,
            trust_remote_code=trust_remote_code,
        )

    return load_valuehead_model


@patch(
    target="verl.models.transformers.monkey_patch:apply_monkey_patch",
    why="verl exchanges the parts of a sequence inside FlashAttention only; with another attention, which is the "
    "default where the package is not, each rank of a sequence-parallel group attends to its own part in silence",
    reference="verl/models/transformers/monkey_patch.py _ulysses_flash_attention_forward",
    remove_when="verl's sequence parallelism works with sdpa, or refuses it",
)
def sequence_parallel_attention(original: Callable) -> Callable:
    @functools.wraps(original)
    def apply_monkey_patch(model: Any, ulysses_sp_size: int = 1, *args: Any, **kwargs: Any) -> Any:
        attention = getattr(model.config, "_attn_implementation", None)
        if ulysses_sp_size > 1 and "flash" not in str(attention):
            raise ValueError(
                explain(
                    "sequence parallelism works with FlashAttention only",
                    asked=f"ulysses_sequence_parallel_size={ulysses_sp_size}",
                    found=f"attention {attention!r}; {_verl.supports('flash_attention_2')[1]}",
                    legal="ulysses_sequence_parallel_size=1 with this attention",
                    fix="set ulysses_sequence_parallel_size=1 for actor, ref and critic, and lower the tokens a "
                    "micro-batch (ppo_max_token_len_per_gpu) instead",
                )
            )
        return original(model, ulysses_sp_size, *args, **kwargs)

    return apply_monkey_patch
