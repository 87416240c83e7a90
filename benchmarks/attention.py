"""Training attention on a CPU, both passes: torch's sdpa against the written-out products that verl-fl uses for
rows up to `verl_fl.engine.attention.SHORT` tokens.

    python benchmarks/attention.py

Last line: one JSON object with `rows` of {`length`, `sdpa_ms`, `folded_ms`} (medians; SmolLM2-135M's heads, bfloat16).
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import _common
import torch
import torch.nn.functional as F

from verl_fl.engine.attention import folded
from verl_fl.platform.cpu import keep_freed_memory

HEADS, GROUPS, DIM, TOKENS = 9, 3, 64, 4096


def main() -> None:
    keep_freed_memory()
    rows = []
    for length in (32, 64, 128, 256, 512):
        ours, theirs = measure(length)
        rows.append({"length": length, "sdpa_ms": round(theirs, 1), "folded_ms": round(ours, 1)})
        print(f"{length:4d} tokens a row: sdpa {theirs:7.1f} ms, folded {ours:7.1f} ms", flush=True)
    _common.report({"rows": rows, "tokens": TOKENS}, ("torch",))


def measure(length: int, repeats: int = 5) -> tuple[float, float]:
    """Median milliseconds of one forward and backward pass: folded, sdpa; alternating."""
    batch = TOKENS // length
    shapes = [(batch, HEADS, length, DIM), (batch, GROUPS, length, DIM), (batch, GROUPS, length, DIM)]
    tensors = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, 1, length, length)
    grad = torch.randn(shapes[0], dtype=torch.bfloat16)

    def sdpa() -> torch.Tensor:
        query, key, value = tensors
        repeated = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(query, *repeated, attn_mask=mask)

    seconds: dict[str, list[float]] = {"folded": [], "sdpa": []}
    for _ in range(repeats + 1):
        for name, forward in (("folded", lambda: folded(*tensors, mask, None, True)), ("sdpa", sdpa)):
            start = time.perf_counter()
            forward().backward(grad)
            seconds[name].append(time.perf_counter() - start)
    ours, theirs = (statistics.median(seconds[name][1:]) * 1e3 for name in ("folded", "sdpa"))
    return ours, theirs


if __name__ == "__main__":
    main()
