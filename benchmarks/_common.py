"""Shared by the benchmarks: models, prompts, repeated timing, one JSON line at the end."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def load_model(path: str, dtype: str, **kwargs: Any) -> Any:
    """A causal LM from a Hugging Face folder or a .gguf file."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(*_source(path, kwargs), dtype=getattr(torch, dtype), **kwargs).eval()


def load_tokenizer(path: str) -> Any:
    """The tokenizer beside (or inside, for .gguf) a model."""
    from transformers import AutoTokenizer

    kwargs: dict[str, Any] = {}
    return AutoTokenizer.from_pretrained(*_source(path, kwargs), **kwargs)


def _source(path: str, kwargs: dict[str, Any]) -> tuple[str]:
    file = Path(path)
    if file.suffix != ".gguf":
        return (path,)
    kwargs["gguf_file"] = file.name
    return (str(file.parent),)


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Distinct prompts of random tokens, within a quarter of the given mean length."""
    rng = random.Random(seed)
    spread = length // 4
    lengths = [rng.randint(length - spread, length + spread) for _ in range(count)]
    return [[rng.randrange(10, vocab) for _ in range(n)] for n in lengths]


def interleaved(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, once unmeasured, then repeats times in turn, so that a busy moment hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median_rate(tokens: int, seconds: list[float]) -> float:
    """Tokens a second at the median time."""
    return round(tokens / statistics.median(seconds), 1)


def report(result: dict[str, Any], packages: tuple[str, ...]) -> None:
    """Print the result as one JSON line, with versions, machine and command."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    print(json.dumps({**result, "versions": versions, "cpus": os.cpu_count(), "command": command}))
