"""What a platform class must state before anybody uses it."""

from __future__ import annotations

from collections.abc import Iterable

from verl_fl._errors import explain
from verl_fl.platform.base import Platform

STATED = ("name", "device_name", "vendor_name", "collective", "visible_devices", "ray_resource")
"""Attributes without a default."""


def check_class(candidate: object) -> type[Platform]:
    """Return ``candidate`` where it is a platform class that states all it must.

    Raises:
        TypeError: it is not.
    """
    if not (isinstance(candidate, type) and issubclass(candidate, Platform)):
        raise TypeError(
            explain(
                "not a platform",
                found=f"{candidate!r:.120}",
                legal="a class derived from verl_fl.platform.Platform",
                fix="see verl_fl/platform/README.md and examples/new_chip",
            )
        )
    missing = [name for name in STATED if not getattr(candidate, name, None)]
    wrong = [name for name in STATED if not isinstance(getattr(candidate, name, ""), (str, property))]
    if missing or wrong or candidate is Platform:
        raise TypeError(
            explain(
                f"platform {candidate.__qualname__} is not complete",
                found=f"missing: {', '.join(missing) or 'nothing'}; not a string: {', '.join(wrong) or 'nothing'}",
                legal=f"strings for {', '.join(STATED)}",
                fix=f"state them in the class body of {candidate.__module__}.{candidate.__qualname__}",
            )
        )
    return candidate


def check_names(candidate: type[Platform], others: Iterable[type | None]) -> None:
    """Check that no other platform has one of the names that would select this one.

    Raises:
        ValueError: one has.
    """
    mine = {candidate.name, *candidate.aliases} - {""}
    for other in others:
        if other is None or not issubclass(other, Platform) or issubclass(other, candidate):
            continue
        shared = mine & {other.name, *other.aliases}
        if shared:
            raise ValueError(
                explain(
                    f"platform name {min(shared)!r} is taken",
                    asked=f"register {candidate.__module__}.{candidate.__qualname__}",
                    found=f"{other.__module__}.{other.__qualname__} has it",
                    fix="choose another `name` or alias for the new platform",
                )
            )
