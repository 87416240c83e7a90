"""What vendors run on their own platform: the conformance kit, and chips that are simulated in host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["conformance_tests"]


def conformance_tests(target: str | type, *, timeout_s: float = 120.0) -> Callable[..., None]:
    """A test function for pytest with one case for each check; assign it to a name that starts with ``test_``.

    The kit runs once, when the first case does. A check that is skipped is a skipped test, with its reason; where the
    target can't be asked at all, each case fails with that reason.

    Args:
        target: ``package.module:Class`` or ``path/to/file.py:Class``, or the class.
        timeout_s: limit of each check.
    """
    import pytest

    from verl_fl.testing.conformance import CHECKS

    @functools.cache
    def results() -> dict[str, Any] | Exception:
        from verl_fl.testing.conformance import runner

        try:
            return {result.name: result for result in runner.run(target, timeout_s=timeout_s).results}
        except (runner.Unusable, ValueError) as error:  # kept: asking again for each case would hang again for each
            return error

    @pytest.mark.parametrize("check", list(CHECKS))
    def test(check: str) -> None:
        found = results()
        if isinstance(found, Exception):
            pytest.fail(str(found), pytrace=False)
        result = found[check]
        if result.verdict == "skipped":
            pytest.skip(result.message)
        if result.verdict == "failed":
            pytest.fail(f"{result.message}\nwhy it matters: {result.why}", pytrace=False)

    test.__doc__ = f"Conformance of {target}."
    return test
