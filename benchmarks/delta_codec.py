"""What the delta codec costs and saves on bfloat16 weights, in one thread, beside a plain copy of the same bytes.

    python benchmarks/delta_codec.py [--repeats N] [--megabytes N] [--piece-kilobytes N] [--without-compiler]

The last line of stdout is one JSON object. Under each share of changed elements: gigabytes of weights a second, encoded
and decoded, and the payload as a share of the weights. Of the changes, seven in eight are one unit in the last place
and the others up to 100, as Adam's small steps make them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import _common
import torch

DENSITIES = (0.0, 0.001, 0.01, 0.045, 0.2, 0.5)


def changed(weights: torch.Tensor, density: float) -> torch.Tensor:
    """The bytes of a later version of the weights."""
    later = weights.clone().view(torch.int16)
    chosen = torch.rand(later.numel()) < density
    steps = torch.where(torch.rand(later.numel()) < 0.875, 1, torch.randint(2, 101, (later.numel(),)))
    signs = 1 - 2 * torch.randint(0, 2, (later.numel(),))
    later[chosen] += (steps * signs).short()[chosen]
    return later.view(torch.uint8)


def gigabytes_a_second(size: int, seconds: list[float]) -> float:
    """At the median time."""
    return round(size / statistics.median(seconds) / 1e9, 2)


def timed(function: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(delta: Any, weights: torch.Tensor, density: float, piece: int, repeats: int) -> dict[str, float]:
    """Encode and decode there and back, so that each repeat finds what the first one found."""
    versions = [weights, changed(weights, density)]
    sender, receiver, copy = weights.clone(), weights.clone(), torch.empty_like(weights)
    count = -(-weights.numel() // piece)
    outs = [torch.zeros(delta.bound(piece), dtype=torch.uint8) for _ in range(count)]
    encode_s, decode_s, copy_s, size = [], [], [], 0
    for repeat in range(-1, repeats):
        new = versions[repeat % 2 == 1]
        pieces = list(zip(new.split(piece), sender.split(piece), outs, strict=True))
        start = time.perf_counter()
        results = [delta.encode(after, before, 2, out) for after, before, out in pieces]
        encode = time.perf_counter() - start
        payloads = [
            (target, out[:size], encoding)
            for target, out, (encoding, size, _) in zip(receiver.split(piece), outs, results, strict=True)
        ]
        start = time.perf_counter()
        for target, payload, encoding in payloads:
            delta.apply(target, payload, encoding, 2)
        decode = time.perf_counter() - start
        assert torch.equal(receiver, new), "the round trip is lossless"
        if repeat >= 0:
            encode_s.append(encode)
            decode_s.append(decode)
            copy_s.append(timed(lambda new=new: copy.copy_(new)))
            size = sum(size for _, size, _ in results)
    return {
        "encode_gb_s": gigabytes_a_second(weights.numel(), encode_s),
        "decode_gb_s": gigabytes_a_second(weights.numel(), decode_s),
        "copy_gb_s": gigabytes_a_second(weights.numel(), copy_s),
        "payload_share": round(size / weights.numel(), 5),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10, help="of each measurement (default 10)")
    parser.add_argument("--megabytes", type=int, default=64, help="of weights (default 64)")
    parser.add_argument("--piece-kilobytes", type=int, default=1024, help="of one call (default 1024)")
    parser.add_argument("--without-compiler", action="store_true", help="measure torch's operators")
    arguments = parser.parse_args()
    if arguments.without_compiler:
        os.environ["CC"] = "no-such-compiler"

    from verl_fl.weight_sync import delta

    torch.manual_seed(0)
    torch.set_num_threads(1)
    weights = (torch.randn(arguments.megabytes << 19) * 0.02).bfloat16().view(torch.uint8)
    piece = arguments.piece_kilobytes << 10
    result = {
        "kernel": delta.kernel(),
        "densities": {
            str(density): measure(delta, weights, density, piece, arguments.repeats) for density in DENSITIES
        },
        "megabytes": arguments.megabytes,
        "piece_kilobytes": arguments.piece_kilobytes,
        "repeats": arguments.repeats,
    }
    _common.report(result, ("verl-fl", "torch"))


if __name__ == "__main__":
    main()
