"""Train and validation files: there, with the columns the trainer asks for, and renderable by the chat template."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_fl._errors import explain
from verl_fl._settings import Settings, select
from verl_fl.preflight._report import report

# What verl's own reward managers read from every row.
_OWN_MANAGERS = ("naive", "dapo", "gdpo", "remote", "rate_limited", "limited", "prime", "batch")
_LEVEL = "fl.checks.data"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """What one data file says of itself without being read."""

    path: Path
    num_rows: int | None
    """None for text files, which would have to be read."""

    columns: tuple[str, ...]
    first: dict[str, Any] | None
    """The first row, or None in an empty file."""


def check_data(config: Any, tokenizer: Any, settings: Settings) -> None:
    """Check every local train and validation file at the level ``fl.checks.data``. A custom data set is skipped."""
    if settings.checks__data == "off" or select(config, "data.custom_cls.path") is not None:
        return
    for key in ("data.train_files", "data.val_files"):
        try:
            files = [open_file(path, key) for path in as_list(select(config, key, [])) if "://" not in path]
            for file in files:
                _check_file(file, config, tokenizer, key)
            if key == "data.train_files" and files:
                _check_batch(files, config)
        except ValueError as error:
            report(settings.checks__data, str(error), key=_LEVEL)


def as_list(paths: Any) -> list[str]:
    """One path or several, as a list of strings."""
    return [paths] if isinstance(paths, str) else [str(path) for path in paths or []]


def open_file(path: str, key: str = "data.train_files") -> DataFile:
    """Read the schema and the first row of a parquet, JSON or JSON-lines file.

    Raises:
        ValueError: no such file, another format, or damaged.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(_no_file(path, key))
    if file.suffix not in (".parquet", ".json", ".jsonl"):
        raise ValueError(
            explain("verl can't read this data file", asked=f"{key}={path}", legal=".parquet, .json, .jsonl")
        )
    try:
        return _open_parquet(file) if file.suffix == ".parquet" else _open_json(file)
    except (OSError, ValueError) as error:
        raise ValueError(
            explain("the data file is damaged", asked=f"{key}={path}", found=str(error).splitlines()[0])
        ) from error


def _no_file(path: str, key: str) -> str:
    file = Path(path)
    expanded = file.expanduser()
    if expanded != file and expanded.is_file():
        return explain(f"{key} starts with ~, which verl does not expand", asked=path, fix=f"set {key}={expanded}")
    folder = expanded.parent
    found = f"{folder} does not exist"
    if folder.is_dir():
        names = sorted(p.name for p in folder.iterdir() if p.suffix in (".parquet", ".json", ".jsonl"))
        found = f"{folder.resolve()} holds {', '.join(names[:8]) or 'no data file'}"
    return explain("the data file does not exist", asked=f"{key}={path}", found=found, fix=f"correct {key}")


def _open_parquet(file: Path) -> DataFile:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as parquet:
        batch = next(parquet.iter_batches(batch_size=1), None)
        rows = batch.to_pylist() if batch is not None else []
        names = tuple(parquet.schema_arrow.names)
        return DataFile(path=file, num_rows=parquet.metadata.num_rows, columns=names, first=next(iter(rows), None))


def _open_json(file: Path) -> DataFile:
    with file.open(encoding="utf-8") as stream:
        line = next((line for line in stream if line.strip()), "")
    try:
        first = json.loads(line) if line else None
    except ValueError:
        first = json.loads(file.read_text(encoding="utf-8"))  # one document over several lines
    rows = first if isinstance(first, list) else [first]
    row = rows[0] if rows and isinstance(rows[0], dict) else None
    return DataFile(path=file, num_rows=None if row else 0, columns=tuple(row or ()), first=row)


def _check_file(file: DataFile, config: Any, tokenizer: Any, key: str) -> None:
    if file.first is None:
        raise ValueError(explain("the data file has no rows", asked=f"{key}={file.path}", fix="write it again"))
    prompt_key = select(config, "data.prompt_key", "prompt")
    need_columns(file.path, file.columns, [prompt_key], key)
    if _reads_reward_columns(config):
        need_columns(file.path, file.columns, ["data_source", "reward_model"], key)
        _check_ground_truth(file)
    check_prompt(file.first[prompt_key], file.path, 0, prompt_key)
    render(tokenizer, file.first[prompt_key], file.path, 0, template_kwargs(select(config, "data")))


def need_columns(path: object, columns: Iterable[str], needed: list[str], key: str = "data.train_files") -> None:
    """Check that ``columns`` has all that are ``needed``.

    Raises:
        ValueError: one is missing; with the file, the columns it has, and the fix.
    """
    columns = tuple(columns)
    missing = [name for name in needed if name not in columns]
    if not missing:
        return
    fixes = {
        "data_source": "add a string column data_source, which names the task of a row",
        "reward_model": "add a column reward_model, such as {'style': 'rule', 'ground_truth': '42'}",
    }
    fix = fixes.get(missing[0], f"add the column {missing[0]!r}, or set data.prompt_key to the one that has the chats")
    raise ValueError(
        explain(
            f"the data file lacks the column {', '.join(map(repr, missing))}",
            asked=f"{key}={path}",
            found="columns " + ", ".join(columns),
            fix=fix,
        )
    )


def _reads_reward_columns(config: Any) -> bool:
    """Whether the rewards come from a manager of verl's, which reads data_source and reward_model of every row."""
    judged = select(config, "reward.reward_model.enable", False)
    if judged and select(config, "reward.custom_reward_function.path") is None:
        return False
    if select(config, "actor_rollout_ref.rollout.agent.agent_loop_config_path") is not None:
        return False  # a user's own agent loop may bring its own score
    source = select(config, "reward.reward_manager.source", "register")
    return source == "register" and select(config, "reward.reward_manager.name", "naive") in _OWN_MANAGERS


def _check_ground_truth(file: DataFile) -> None:
    value = (file.first or {}).get("reward_model")
    if not isinstance(value, dict) or "ground_truth" not in value:
        found = f"{type(value).__name__} {list(value)}" if isinstance(value, dict) else f"{value!r}"
        raise ValueError(
            explain(
                "the column 'reward_model' has no ground_truth",
                asked=f"{file.path}, row 0",
                found=found,
                fix="write it as {'style': 'rule', 'ground_truth': '42'}",
            )
        )


def check_prompt(prompt: Any, path: object, row: int, key: str = "prompt") -> None:
    """Check that ``prompt`` is a chat: a list of messages with role and content.

    Raises:
        ValueError: it is not; with file, row and how to convert it.
    """
    chat = isinstance(prompt, list) and bool(prompt)
    if chat and all(isinstance(message, dict) and {"role", "content"} <= set(message) for message in prompt):
        return
    shown = repr(prompt)
    fix = "write each prompt as a list of messages with role and content"
    if isinstance(prompt, str):
        fix = f"convert it: df[{key!r}] = df[{key!r}].map(lambda text: [{{'role': 'user', 'content': text}}])"
    raise ValueError(
        explain(
            f"the column {key!r} does not hold chats",
            asked=f"{path}, row {row}",
            found=f"{type(prompt).__name__}: {shown[:80]}{'...' if len(shown) > 80 else ''}",
            legal="[{'role': 'user', 'content': 'text'}, ...]",
            fix=fix,
        )
    )


def template_kwargs(data_config: Any) -> dict[str, Any]:
    """``data.apply_chat_template_kwargs`` without what verl sets itself."""
    given = dict(select(data_config, "apply_chat_template_kwargs", {}) or {})
    return {name: value for name, value in given.items() if name not in ("tokenize", "return_dict", "return_tensors")}


def render(tokenizer: Any, prompt: list[dict], path: object, row: int, kwargs: dict[str, Any]) -> None:
    """Render ``prompt`` through the chat template; without a tokenizer, do nothing.

    Raises:
        ValueError: the tokenizer has no template, or the template raises; with file, row and cause.
    """
    if tokenizer is None or any(not isinstance(message["content"], str) for message in prompt):
        return  # images and the like go through a processor
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            explain(
                "the tokenizer has no chat template, and the prompts are chats",
                asked=f"{path}, row {row}",
                found=f"{type(tokenizer).__name__} of {getattr(tokenizer, 'name_or_path', '?')}",
                fix="use the instruct version of the model, or set actor_rollout_ref.model.custom_chat_template",
            )
        )
    try:
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **kwargs)
    except Exception as error:
        raise ValueError(template_failed(error, prompt, path, row)) from error


def template_failed(error: BaseException, prompt: Any, path: object, row: object) -> str:
    """The message for a chat template that raises ``error`` on ``prompt``."""
    roles = [message.get("role") for message in prompt] if isinstance(prompt, list) else type(prompt).__name__
    return explain(
        "the chat template raises on a prompt",
        asked=f"{path}, row {row}, roles {roles}",
        found=f"{type(error).__name__}: {error}",
        fix="change the row, or set actor_rollout_ref.model.custom_chat_template",
    )


def _check_batch(files: list[DataFile], config: Any) -> None:
    counts = [file.num_rows for file in files]
    if any(count is None for count in counts):
        return
    rows = sum(count for count in counts if count)
    limit = int(select(config, "data.train_max_samples", -1))
    check_batch_size(min(rows, limit) if limit > 0 else rows, config.data, ", ".join(str(file.path) for file in files))


def check_batch_size(num_rows: int, data_config: Any, files: object) -> None:
    """Check that an epoch has at least one step.

    Raises:
        ValueError: fewer rows than ``data.train_batch_size``; verl would drop the only batch and train nothing.
    """
    batch_size = int(select(data_config, "train_batch_size", 1))
    if num_rows < batch_size:
        raise ValueError(
            explain(
                "the training data has fewer rows than one batch, so an epoch has no step",
                asked=f"data.train_batch_size={batch_size}",
                found=f"{num_rows} rows in {files}",
                fix=f"set data.train_batch_size to at most {num_rows}, or add rows",
            )
        )


def shortest_and_longest(lengths: Iterable[int], limit: int = 1000) -> tuple[int, int]:
    """The least and the greatest of the first ``limit`` lengths."""
    seen = list(itertools.islice(lengths, limit))
    return min(seen), max(seen)
