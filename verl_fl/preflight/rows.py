"""Every row of a loaded data set: has its prompt, is a chat, renders, and why rows were dropped."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from verl_fl._errors import explain
from verl_fl.preflight.data import (
    as_list,
    check_prompt,
    need_columns,
    render,
    shortest_and_longest,
    template_failed,
    template_kwargs,
)


def check_rows(dataset: Any, dataframe: Any) -> None:
    """Check the column of the prompts and the first row of an ``RLHFDataset`` that has just been read.

    Raises:
        ValueError: no rows, no such column, not a chat, or a template that raises.
    """
    files = files_of(dataset)
    if len(dataframe) == 0:
        raise ValueError(explain("the data has no rows", asked=files))
    need_columns(files, dataframe.column_names, [dataset.prompt_key])
    prompt = dataframe[0][dataset.prompt_key]
    check_prompt(prompt, files, 0, dataset.prompt_key)
    if dataset.processor is None:
        render(dataset.tokenizer, prompt, files, 0, _kwargs(dataset))


def explain_dropped(dataset: Any, dataframe: Any, kept: Any) -> None:
    """Find out why rows were dropped, where it may have been a fault; prompts that are too long are none.

    Raises:
        ValueError: the template raises on a row, or no row is left.
    """
    if dataset.processor is None:
        lengths, failure = _first_failure(dataset, dataframe, measure=len(kept) == 0)
        if failure is not None:
            raise ValueError(failure)
        if len(kept) == 0:
            raise ValueError(_none_left(dataset, len(dataframe), *shortest_and_longest(iter(lengths))))
    elif len(kept) == 0:
        raise ValueError(_none_left(dataset, len(dataframe), None, None))


def _first_failure(dataset: Any, dataframe: Any, *, measure: bool) -> tuple[list[int], str | None]:
    """Render all rows again, as text, up to the first that fails: its message, and if ``measure`` the tokens of the
    first thousand before it."""
    lengths: list[int] = []
    kwargs = _kwargs(dataset)
    for row, prompt in enumerate(_prompts(dataset, dataframe)):
        try:
            check_prompt(prompt, *place(dataset, row), dataset.prompt_key)
        except ValueError as error:
            return lengths, str(error)
        try:
            text = dataset.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **kwargs)
        except Exception as error:
            return lengths, template_failed(error, prompt, *place(dataset, row))
        if measure and row < 1000:
            lengths.append(len(dataset.tokenizer(text, add_special_tokens=False)["input_ids"]))
    return lengths, None


def _prompts(dataset: Any, dataframe: Any) -> Iterator[Any]:
    for row in dataframe.select_columns([dataset.prompt_key]):
        yield row[dataset.prompt_key]


def place(dataset: Any, row: int) -> tuple[str, int]:
    """The file and the row in it, where the rows are still those of the files in order; else all files and ``row``."""
    files = as_list(dataset.data_files)
    if dataset.max_samples > 0 or len(files) == 1 or not all(file.endswith(".parquet") for file in files):
        return files_of(dataset), row
    for file in files:
        count = _num_rows(file)
        if row < count:
            return file, row
        row -= count
    return files_of(dataset), row


@functools.cache
def _num_rows(file: str) -> int:
    import pyarrow.parquet as pq

    return pq.read_metadata(file).num_rows


def files_of(dataset: Any) -> str:
    """The data set's files as the user named them."""
    return ", ".join(as_list(getattr(dataset, "original_data_files", dataset.data_files)))


def _kwargs(dataset: Any) -> dict[str, Any]:
    kwargs = template_kwargs({"apply_chat_template_kwargs": dataset.apply_chat_template_kwargs})
    return kwargs if dataset.tool_schemas is None else {**kwargs, "tools": dataset.tool_schemas}


def _none_left(dataset: Any, num_rows: int, shortest: int | None, longest: int | None) -> str:
    found = f"{num_rows} rows" + (f" of {shortest} to {longest} tokens" if shortest is not None else "")
    if shortest is not None and shortest <= dataset.max_prompt_length:
        return explain(
            "no prompt is left, though some are short enough: verl could not process them",
            asked=files_of(dataset),
            found=found,
            fix="read the tracebacks above, one a row",
        )
    return explain(
        "no prompt is left, because all are longer than data.max_prompt_length",
        asked=f"data.max_prompt_length={dataset.max_prompt_length}, {files_of(dataset)}",
        found=found,
        fix=f"set data.max_prompt_length to at least {shortest or 'the shortest prompt'}",
    )
