"""The data set as the trainer reads it: a row that can't be rendered and a set that ends up empty are errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl_fl.patches.ledger import patch


@patch(
    target="verl.utils.dataset.rl_dataset:RLHFDataset.maybe_filter_out_long_prompts",
    why="a missing column and a chat template that raises are printed as a traceback a row, every such row is dropped, "
    "and the run goes on with an empty data set",
    reference="case missing-column; verl/utils/dataset/rl_dataset.py doc2len",
    remove_when="verl raises when a row can't be rendered or no row is left",
)
def filter_that_tells(original: Callable) -> Callable:
    @functools.wraps(original)
    def maybe_filter_out_long_prompts(self: Any, dataframe: Any = None) -> Any:
        from verl_fl.preflight import rows

        rows.check_rows(self, dataframe)
        kept = original(self, dataframe)
        if len(kept) < len(dataframe):
            rows.explain_dropped(self, dataframe, kept)
        return kept

    return maybe_filter_out_long_prompts


@patch(
    target="verl.trainer.ppo.utils:create_rl_dataset",
    why="a training set smaller than one batch gives an epoch of zero steps: a division by zero, or a run that trains "
    "nothing and ends well",
    reference="case missing-column; verl/trainer/ppo/v1/trainer_base.py _init_dataloader",
    remove_when="verl checks that an epoch has a step",
)
def one_batch_at_least(original: Callable) -> Callable:
    @functools.wraps(original)
    def create_rl_dataset(
        data_paths: Any,
        data_config: Any,
        tokenizer: Any,
        processor: Any,
        is_train: bool = True,
        max_samples: int = -1,
    ) -> Any:
        from verl_fl.preflight.data import as_list, check_batch_size

        dataset = original(data_paths, data_config, tokenizer, processor, is_train=is_train, max_samples=max_samples)
        if is_train:
            check_batch_size(len(dataset), data_config, ", ".join(as_list(data_paths)))
        return dataset

    return create_rl_dataset
