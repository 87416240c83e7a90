"""The task both trainers get: short arithmetic questions, and a reward that both compute with the same function."""

from __future__ import annotations

import random
import re


def questions(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """``(question, answer)`` pairs of one-digit sums and differences, never negative."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        plus = rng.random() < 0.5
        a, b = (a, b) if plus or a >= b else (b, a)
        sign, answer = ("+", a + b) if plus else ("-", a - b)
        pairs.append((f"What is {a} {sign} {b}? Answer with the number only.", str(answer)))
    return pairs


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """0.7 if the last number in the answer is right, 0.3 if the answer is a number and nothing else."""
    numbers = re.findall(r"-?\d+", solution_str)
    alone = solution_str.strip().rstrip(".").lstrip("-").isdigit()
    return 0.7 * (bool(numbers) and numbers[-1] == ground_truth) + 0.3 * alone
