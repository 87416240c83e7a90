"""Stock verl on any AI accelerator, on several vendors in one job, and on no accelerator at all.

Importing this package loads none of torch, ray and verl. Everything starts in :mod:`verl_fl.plugin`, which verl
itself imports through the entry point group ``verl.plugins``.
"""

from verl_fl._version import __version__

__all__ = ["__version__", "register"]


def register(platform_cls: type) -> None:
    """Make verl know a chip: what a vendor's package calls from its own ``verl.plugins`` entry point. Idempotent.

    Raises:
        TypeError: ``platform_cls`` is not a complete :class:`verl_fl.platform.Platform`.
        ValueError: one of its names belongs to another platform.
    """
    from verl_fl.plugin import register_platform

    register_platform(platform_cls)
