"""The few questions that several rooms ask verl, in one place."""

from __future__ import annotations

from typing import Any

from verl_fl.platform.base import Platform


def current_platform() -> Any:
    """verl's platform of this process; one of ours has every method of :class:`Platform`, a stock one only verl's."""
    from verl.plugin.platform import get_platform

    return get_platform()


def on_our_platform() -> bool:
    """Whether the current platform is one that verl-fl brings."""
    return isinstance(current_platform(), Platform)


def supports(feature: str) -> tuple[bool, str]:
    """Like :meth:`Platform.supports`; a stock platform of verl is taken to support what verl assumes."""
    platform = current_platform()
    if isinstance(platform, Platform):
        return platform.supports(feature)
    return True, f"stock platform {type(platform).__name__}"
