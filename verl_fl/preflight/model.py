"""The model's folder and its tokenizer: there, whole, and able to render a chat."""

from __future__ import annotations

import functools
import json
import os
import struct
from pathlib import Path
from typing import Any

from verl_fl._errors import explain
from verl_fl._settings import select

_KEY = "actor_rollout_ref.model.path"
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")


def find_model(config: Any, key: str = _KEY) -> Path | None:
    """The local folder of the model, or None where it will be downloaded by verl.

    Raises:
        ValueError: no such folder, no model in it, or a hub name that can't be fetched offline.
    """
    path = str(select(config, key, ""))
    if "://" in path:
        return None
    folder = Path(path)
    if folder.is_dir():
        return _whole(folder, path, key)
    if _looks_local(path):
        raise ValueError(_absent(path, key))
    return _cached(path, key)


def _looks_local(path: str) -> bool:
    if path.startswith(("/", "~", ".")) or path.count("/") > 1 or not path:
        return True
    return "/" in path and Path(path).parent.is_dir()


def _absent(path: str, key: str) -> str:
    expanded = Path(path).expanduser()
    if path.startswith("~") and expanded.is_dir():
        return explain(f"{key} starts with ~, which verl does not expand", asked=path, fix=f"set {key}={expanded}")
    existing = next((str(p) for p in expanded.parents if p.is_dir()), "/")
    return explain(
        "the model folder does not exist",
        asked=f"{key}={path}" + ("" if expanded.is_absolute() else f", from {os.getcwd()}"),
        found=f"{existing} holds " + (", ".join(sorted(os.listdir(existing))[:8]) or "nothing"),
        legal="a folder in Hugging Face format, or a hub name such as HuggingFaceTB/SmolLM2-135M-Instruct",
        fix=f"correct {key}",
    )


def _cached(name: str, key: str) -> Path | None:
    from huggingface_hub import constants, try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "") in ("1", "true", "True"):
        raise ValueError(
            explain(
                f"the model {name!r} is not in the local cache, and the hub is switched off",
                asked=f"{key}={name}, HF_HUB_OFFLINE=1",
                found=f"no config.json of it in {constants.HF_HUB_CACHE}",
                fix=f"set {key} to a local folder, or unset HF_HUB_OFFLINE, or fetch it once: hf download {name}",
            )
        )
    return None


def _whole(folder: Path, path: str, key: str) -> Path:
    weights = [file for pattern in _WEIGHTS for file in folder.glob(pattern)]
    gguf = any(file.suffix == ".gguf" for file in weights)
    parts = {"config.json": gguf or (folder / "config.json").is_file(), "weights (*.safetensors)": bool(weights)}
    missing = [what for what, there in parts.items() if not there]
    if missing:
        raise ValueError(
            explain(
                f"the model folder lacks {' and '.join(missing)}",
                asked=f"{key}={path}",
                found=", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "an empty folder",
                fix="point it to the folder that save_pretrained wrote (of an unmerged verl checkpoint: "
                "python -m verl.model_merger merge)",
            )
        )
    return folder


def load_tokenizer(config: Any, folder: Path | None) -> Any:
    """The tokenizer that renders the prompts, with ``custom_chat_template`` set; None where it isn't local.

    Raises:
        ValueError: the folder holds no tokenizer that can be loaded.
    """
    path = select(config, "actor_rollout_ref.model.tokenizer_path") or (str(folder) if folder else None)
    if path is None or not Path(path).is_dir():
        return None
    from verl.utils import hf_tokenizer

    try:
        trusted = bool(select(config, "actor_rollout_ref.model.trust_remote_code", False))
        tokenizer = hf_tokenizer(path, trust_remote_code=trusted)
    except Exception as error:
        if any(Path(path).glob("*.gguf")):
            return None
        raise ValueError(
            explain(
                "the tokenizer can't be loaded",
                asked=path,
                found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                fix="set actor_rollout_ref.model.tokenizer_path to a folder that has one",
            )
        ) from error
    template = select(config, "actor_rollout_ref.model.custom_chat_template")
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


@functools.lru_cache(maxsize=4)
def count_parameters(folder: Path) -> int | None:
    """Parameters of the model in ``folder``, from its files' headers alone; None where they don't tell."""
    safetensors = sorted(folder.glob("*.safetensors"))
    if safetensors:
        return sum(_safetensors_elements(file) for file in safetensors)
    binaries = [file for file in folder.glob("*.bin") if file.name.startswith("pytorch_model")]
    if binaries:
        return sum(file.stat().st_size for file in binaries) // _config_bytes(folder)
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        return sum(_gguf_elements(file) for file in gguf)
    return None


def _safetensors_elements(file: Path) -> int:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    total = 0
    for name, entry in header.items():
        if name != "__metadata__":
            elements = 1
            for dim in entry["shape"]:
                elements *= dim
            total += elements
    return total


def _gguf_elements(file: Path) -> int:
    try:
        from gguf import GGUFReader
    except ImportError:
        return int(file.stat().st_size * 1.6)  # about five bits a weight
    return sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)


def _config_bytes(folder: Path) -> int:
    config = read_config(folder)
    return 4 if "32" in str(config.get("dtype") or config.get("torch_dtype") or "float32") else 2


def read_config(folder: Path | None) -> dict[str, Any]:
    """``config.json`` of ``folder``, or an empty dictionary."""
    file = folder / "config.json" if folder else None
    return json.loads(file.read_text()) if file and file.is_file() else {}
