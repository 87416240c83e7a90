"""Is the user's input what verl can read? Looked at without executing it and before a model is loaded."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

from verl_fl.cli._exit import usage
from verl_fl.cli.options import Options

_HF_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_COLUMNS = {
    "prompt": "a list of {role, content}",
    "data_source": "a string that names the data set",
    "reward_model": "a struct with ground_truth",
}
_SCORE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def check(options: Options) -> None:
    """Check model, data and reward.

    Raises:
        UsageError: the first that verl could not use.
    """
    if options.model is not None:
        model_kind(options.model)
    if options.train is not None:
        check_parquet(Path(options.train), "--train", at_least=options.batch)
    if options.val is not None:
        check_parquet(Path(options.val), "--val", at_least=1)
    if options.reward not in (None, "verl"):
        check_reward(Path(options.reward))


def model_kind(model: str) -> str:
    """Return ``gguf``, ``folder`` or ``hub``."""
    path = Path(model).expanduser()
    if model.endswith(".gguf"):
        if not path.is_file():
            raise usage(
                f"no model file {model}",
                asked=f"--model {model}",
                found=_nearest(path),
                legal="a .gguf file, a folder with config.json, or a Hugging Face id",
                fix="check the path",
            )
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise usage(
                f"{model} is not a GGUF file",
                asked=f"--model {model}",
                found=f"it starts with {magic!r}",
                legal="a file that starts with b'GGUF'",
                fix="download it again",
            )
        return "gguf"
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise usage(
                f"{model} holds no model",
                asked=f"--model {model}",
                found="no config.json in it",
                legal="a folder as save_pretrained writes it",
                fix="name the folder with config.json",
            )
        check_chat_template(path, f"--model {model}")
        return "folder"
    if path.is_file():
        raise usage(
            f"{model} is not a model",
            asked=f"--model {model}",
            found="a file that does not end in .gguf",
            legal="a .gguf file, a folder with config.json, or a Hugging Face id",
            fix="name the folder the file lies in",
        )
    if _HF_ID.match(model) and not model.startswith((".", "/", "~")):
        return "hub"
    raise usage(
        f"no model at {model}",
        asked=f"--model {model}",
        found=_nearest(path),
        legal="a .gguf file, a folder with config.json, or a Hugging Face id such as owner/name",
        fix="check the path",
    )


def check_chat_template(folder: Path, asked: str) -> None:
    """verl renders every prompt through the tokenizer's chat template; without one it fails in a worker, late."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return
    config = folder / "tokenizer_config.json"
    found = "no tokenizer_config.json"
    if config.is_file():
        if '"chat_template"' in config.read_text(encoding="utf-8"):
            return
        found = f"no chat_template in {config.name}"
    raise usage(
        "this model's tokenizer has no chat template, so it can't be given prompts with roles",
        asked=asked,
        found=found,
        legal="a folder with chat_template.jinja, or with chat_template in tokenizer_config.json",
        fix="use the instruct version of the model, or write its template to chat_template.jinja in the folder",
    )


def check_parquet(path: Path, option: str, *, at_least: int) -> None:
    """Check suffix, columns and number of rows, from the file's footer alone."""
    if path.suffix != ".parquet":
        raise usage(
            f"{option} takes a parquet file",
            asked=f"{option} {path}",
            legal="FILE.parquet",
            fix="pandas: read_json(...).to_parquet('train.parquet')",
        )
    if not path.is_file():
        raise usage(f"no file {path}", asked=f"{option} {path}", found=_nearest(path), fix="check the path")
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise usage(
            f"{path} can't be read as parquet",
            asked=f"{option} {path}",
            found=str(error).splitlines()[0],
            fix="write it again; see docs for the columns",
        ) from error
    columns = file.schema_arrow.names
    if missing := [name for name in _COLUMNS if name not in columns]:
        raise usage(
            f"{path.name} lacks what verl reads: {', '.join(missing)}",
            asked=f"{option} {path}",
            found=f"columns {', '.join(columns)}",
            legal="; ".join(f"{name}: {meaning}" for name, meaning in _COLUMNS.items()),
            fix="add the columns, under these names",
        )
    rows = file.metadata.num_rows
    if rows < at_least:
        raise usage(
            f"{path.name} has fewer rows than one step takes",
            asked=f"--batch {at_least}",
            found=f"{rows} rows",
            legal=f"{at_least} or more",
            fix=f"--batch {max(rows, 1)}, or more data",
        )


def check_reward(path: Path) -> None:
    """Parse the file, without running it, for a ``compute_score`` that verl can call."""
    if path.suffix != ".py":
        raise usage(
            "--reward takes a Python file",
            asked=f"--reward {path}",
            legal="FILE.py, or verl",
            fix="write compute_score(data_source, solution_str, ground_truth, extra_info=None) to a .py file",
        )
    if not path.is_file():
        raise usage(f"no file {path}", asked=f"--reward {path}", found=_nearest(path), fix="check the path")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (SyntaxError, UnicodeDecodeError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise usage(f"{path.name} is not valid Python", asked=f"--reward {path}", found=where, fix="mend it") from None
    names = {name: node for node in tree.body for name in _defined(node)}
    if "compute_score" not in names:
        raise usage(
            f"{path.name} has no compute_score",
            asked=f"--reward {path}",
            found=", ".join(sorted(names)) or "nothing",
            legal="def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float",
            fix="rename your function, or add one of that name",
        )
    _check_signature(names["compute_score"], path)


def _check_signature(node: ast.stmt, path: Path) -> None:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    arguments = node.args
    accepted = {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)}
    refused = [] if arguments.kwarg else [name for name in _SCORE_ARGUMENTS if name not in accepted]
    if refused:
        raise usage(
            f"compute_score does not take {', '.join(refused)}, which verl passes by name",
            asked=f"--reward {path}",
            found=f"def compute_score({ast.unparse(arguments)})",
            legal="def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float",
            fix="add the arguments, or **kwargs",
        )


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    return []


def _nearest(path: Path) -> str:
    path = path.absolute()
    nearest = next(parent for parent in path.parents if parent.exists())
    if nearest != path.parent:
        return f"no folder {path.parent}"
    return f"in {nearest}: " + (", ".join(sorted(os.listdir(nearest))[:8]) or "nothing")
