"""The few questions that several rooms ask verl, in one place."""

from __future__ import annotations

from typing import Any

from verl_fl.platform.base import Platform


def current_platform() -> Any:
    """verl's platform of this process; one of ours has every method of :class:`Platform`, a stock one only verl's."""
    from verl.plugin.platform import get_platform

    return get_platform()


def decided_platform() -> Any:
    """verl's platform of this process, or None where nobody has asked for it yet."""
    from verl.plugin.platform import platform_manager

    return platform_manager._current_platform


def expected_platform() -> Any:
    """verl's platform of this process, or the one that it would decide on now; asking decides nothing.

    For what verl asks while its modules are imported, when a later plugin or ``trainer.device`` may still change it.
    """
    from verl.plugin.platform import PlatformRegistry, platform_manager

    if (decided := decided_platform()) is not None:
        return decided
    platform_cls = PlatformRegistry.get(platform_manager._detect_platform_name())
    return current_platform() if platform_cls is None else platform_cls()  # the former says what is wrong


def on_our_platform() -> bool:
    """Whether the current platform is one that verl-fl brings."""
    return isinstance(current_platform(), Platform)


def supports(feature: str) -> tuple[bool, str]:
    """Like :meth:`Platform.supports`; a stock platform of verl is taken to support what verl assumes."""
    platform = current_platform()
    if isinstance(platform, Platform):
        return platform.supports(feature)
    return True, f"stock platform {type(platform).__name__}"
