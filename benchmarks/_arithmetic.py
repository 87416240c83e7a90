"""The task both trainers get: short arithmetic questions, and a reward that both compute with the same function."""

from __future__ import annotations

import random
import re


def questions(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """``(question, answer)`` pairs of one- and two-digit sums and differences, never negative."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        a, b = rng.randint(2, 20), rng.randint(2, 20)
        plus = rng.random() < 0.5
        a, b = (a, b) if plus or a >= b else (b, a)
        sign, answer = ("+", a + b) if plus else ("-", a - b)
        pairs.append((f"What is {a} {sign} {b}? Answer with the number only.", str(answer)))
    return pairs


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1 if the last number in the answer is right, and half of it only if the answer is not just the number."""
    numbers = re.findall(r"-?\d+", solution_str)
    if not numbers or numbers[-1] != ground_truth:
        return 0.0
    return 1.0 if solution_str.strip().rstrip(".") == ground_truth else 0.5
