"""Makes a :class:`Platform` into one of verl's, without importing verl: the caller hands verl's classes in."""

from __future__ import annotations

from verl_fl.platform.base import Platform

_STOCK_KNOWS = ("apply_model_patches", "get_collective_module", "is_ipc_supported", "rollout_env_vars")
"""What verl's own class for a chip answers better than our defaults do; the rest says the same in other words."""


def to_verl(platform_cls: type[Platform], verl_base: type, stock: type | None = None) -> type:
    """Return a subclass of ``verl_base`` whose every member is answered by ``platform_cls``.

    Args:
        stock: verl's own class for the same chip. It is a base of the result, and answers where neither the vendor's
            file nor its names do.

    Raises:
        TypeError: verl asks for a member that the contract lacks, which means an untested verl.
    """
    parent = stock or verl_base
    members = {
        name: getattr(parent, name)
        for name in _STOCK_KNOWS
        if stock is not None and getattr(platform_cls, name) is getattr(Platform, name)
    }
    bridged = type(
        f"{platform_cls.__name__}ForVerl", (platform_cls, parent), {"__module__": platform_cls.__module__, **members}
    )
    missing = sorted(getattr(bridged, "__abstractmethods__", ()))
    if missing:
        raise TypeError(
            f"verl's {verl_base.__name__} asks platforms for {', '.join(missing)}, which verl-fl does not know; "
            "this verl is outside the range verl-fl was tested with"
        )
    return bridged
