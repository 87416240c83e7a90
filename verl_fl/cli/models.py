"""The user's model as a local folder that verl can load."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from verl_fl.cli._exit import usage
from verl_fl.cli.inputs import check_chat_template, model_kind
from verl_fl.cli.options import Options


def fetch(options: Options, say: Callable[[str], None]) -> str:
    """Return a local folder of the user's model: as it is, converted from GGUF, or out of the hub's cache.

    Raises:
        UsageError: it can't be had, or has no chat template.
    """
    assert options.model is not None
    kind = model_kind(options.model)
    if kind == "folder":
        return str(Path(options.model).expanduser().absolute())
    if kind == "gguf":
        target = Path(options.out) / "model"
        say(f"converting {options.model} to bfloat16 safetensors in {target} (once)")
        _convert(Path(options.model).expanduser().absolute(), target)
        check_chat_template(target, f"--model {options.model}")
        return str(target)
    folder = _download(options.model, say)
    check_chat_template(Path(folder), f"--model {options.model}")
    return folder


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    except Exception as error:  # transformers raises many kinds; all mean that it can't read this file
        raise usage(
            f"transformers can't convert {source.name}",
            asked=f"--model {source}",
            found=f"{type(error).__name__}: {error}",
            legal="GGUF files of the architectures that transformers lists under 'GGUF'",
            fix="use the model's own safetensors folder instead",
        ) from error
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


def _download(name: str, say: Callable[[str], None]) -> str:
    from huggingface_hub import constants, snapshot_download

    offline = constants.HF_HUB_OFFLINE
    ignore = ["*.gguf", "*.onnx", "onnx/*", "*.h5", "*.msgpack", "*.pth", "original/*"]
    say(
        f"fetching {name} "
        + ("from the local cache (HF_HUB_OFFLINE is set)" if offline else "from the Hugging Face hub")
    )
    try:
        return snapshot_download(name, ignore_patterns=ignore, local_files_only=offline)
    except Exception as error:  # no network, no such model, no permission, not cached
        raise usage(
            f"the model {name} can't be had",
            asked=f"--model {name}",
            found=f"not a local folder; {type(error).__name__}: {str(error).strip().splitlines()[0]}"
            + (f"; HF_HUB_OFFLINE={os.environ.get('HF_HUB_OFFLINE')}" if offline else ""),
            legal="a folder with config.json, a .gguf file, or an id of the hub",
            fix="unset HF_HUB_OFFLINE and try again with a network, or name a local folder or file"
            if offline
            else "check the id, the network, and (for a gated model) HF_TOKEN; or name a local folder or file",
        ) from error
