"""Torch's threads, which on a CPU are the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from verl_fl import _verl
from verl_fl.patches.ledger import patch


@patch(
    target="transfer_queue.utils.common:limit_pytorch_auto_parallel_threads",
    why="TransferQueue sets torch's threads for its own copies and afterwards not back to what they were but to Ray's "
    "one thread, so that a CPU trainer computes on a single core after its first batch",
    reference="transfer_queue/utils/common.py (0.1.11)",
    remove_when="TransferQueue restores the number of threads that it found",
)
def threads_stay(original: Callable) -> Callable:
    @contextmanager
    def limit_pytorch_auto_parallel_threads(*args: Any, **kwargs: Any) -> Iterator[None]:
        if _verl.current_platform().device_name == "cpu":
            yield
            return
        with original(*args, **kwargs):
            yield

    return limit_pytorch_auto_parallel_threads
