"""What vendors run on their own platform: the conformance kit, and chips that are simulated in host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["conformance_tests"]


def conformance_tests(target: str, *, timeout_s: float = 120.0) -> Callable[..., None]:
    """A test function for pytest with one case for each check; assign it to a name that starts with ``test_``.

    The kit runs once, when the first case does. A check that is skipped is a skipped test, with its reason.

    Args:
        target: ``package.module:Class`` or ``path/to/file.py:Class``.
        timeout_s: limit of each check.
    """
    import pytest

    from verl_fl.testing.conformance import CHECKS

    @functools.cache
    def results() -> dict[str, Any]:
        from verl_fl.testing.conformance import runner

        return {result.name: result for result in runner.run(target, timeout_s=timeout_s).results}

    @pytest.mark.parametrize("check", list(CHECKS))
    def test(check: str) -> None:
        result = results()[check]
        if result.verdict == "skipped":
            pytest.skip(result.message)
        if result.verdict == "failed":
            pytest.fail(f"{result.message}\nwhy it matters: {result.why}", pytrace=False)

    test.__doc__ = f"Conformance of {target}."
    return test
