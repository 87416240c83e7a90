"""Makes a :class:`Platform` into one of verl's, without importing verl: the caller hands verl's base class in."""

from __future__ import annotations

from verl_fl.platform.base import Platform


def to_verl(platform_cls: type[Platform], verl_base: type) -> type:
    """Return a subclass of ``verl_base`` whose every abstract member is answered by ``platform_cls``.

    ``platform_cls`` comes first in the method order, so its defaults win over verl's.

    Raises:
        TypeError: verl asks for a member that the contract lacks, which means an untested verl.
    """
    members = {"device_name": platform_cls.device_name, "vendor_name": platform_cls.vendor_name}
    bridged = type(f"{platform_cls.__name__}ForVerl", (platform_cls, verl_base), members)
    missing = sorted(getattr(bridged, "__abstractmethods__", ()))
    if missing:
        raise TypeError(
            f"verl's {verl_base.__name__} asks platforms for {', '.join(missing)}, which verl-fl does not know; "
            "this verl is outside the range verl-fl was tested with"
        )
    return bridged
