"""What ``import verl`` loads: register, patch, report.

verl imports this module through the entry point group ``verl.plugins`` and hides whatever it raises at level DEBUG, so
:func:`load` logs a failure as an ERROR, with the remedy, before it raises it again. Nothing here asks verl which
platform this is; everything that would is done when the module concerned is imported.
"""

from __future__ import annotations

import logging
from types import ModuleType

import wrapt

from verl_fl._errors import explain
from verl_fl._version import __version__

logger = logging.getLogger("verl_fl")

VERL_RANGE = ">=0.9,<0.10"
VERL_TESTED = "0.9.1"


def load() -> None:
    """Make verl know verl-fl's platforms, engines and rollouts. Idempotent; called on import.

    Raises:
        RuntimeError: verl is outside the range this version was written for.
    """
    try:
        _check_verl()
        _register_platforms()
        from verl_fl.patches import LEDGER

        LEDGER.install()
        for module, hook in _HOOKS.items():
            wrapt.register_post_import_hook(hook, module)
    except Exception as error:
        logger.error("verl-fl %s could not load, so verl runs without it: %s\n%s", __version__, error, _REMEDY)
        raise


_REMEDY = "Run `verl-fl doctor` for the versions and what is missing; VERL_USE_EXTERNAL_PLUGINS=none runs verl without."


def _check_verl() -> None:
    from importlib.metadata import version

    from packaging.specifiers import SpecifierSet

    installed = version("verl")
    if installed not in SpecifierSet(VERL_RANGE, prereleases=True):
        raise RuntimeError(
            explain(
                f"verl {installed} is outside the range of verl-fl {__version__}",
                found=f"verl {installed}",
                legal=f"verl {VERL_RANGE}, tested with {VERL_TESTED}",
                fix=f"pip install 'verl{VERL_RANGE}'",
            )
        )


def _register_platforms() -> None:
    from verl_fl.platform.manager import platform_classes

    for platform_cls in platform_classes().values():
        register_platform(platform_cls)


def register_platform(platform_cls: type) -> None:
    """Make verl and detection know a platform. Its names select it, verl's name for the same chip among them.

    Called by a vendor's package through :func:`verl_fl.register`. Idempotent.

    Raises:
        TypeError: ``platform_cls`` is not a :class:`verl_fl.platform.Platform`, or lacks what one must state.
        ValueError: one of its names belongs to another platform.
    """
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    from verl_fl.platform.bridge import to_verl
    from verl_fl.platform.check import check_class, check_names

    checked = check_class(platform_cls)
    check_names(checked, map(PlatformRegistry.get, PlatformRegistry.registered_names()))
    if issubclass(PlatformRegistry.get(checked.name) or object, checked):
        return
    stock = PlatformRegistry.get(checked.verl_name)  # it stays, under its own name; detection takes ours
    PlatformRegistry.register(platform=checked.name)(to_verl(checked, PlatformBase, stock))


def _register_engines(_: ModuleType) -> None:
    from verl_fl.engine import fsdp

    fsdp.register()


def _register_replica(module: ModuleType) -> None:
    module.RolloutReplicaRegistry.register("native", _load_replica)


def _load_replica() -> type:
    from verl_fl.rollout.native.replica import NativeReplica

    return NativeReplica


def _register_adapter(module: ModuleType) -> None:
    module._ROLLOUT_REGISTRY[("native", "async")] = "verl_fl.rollout.native.adapter.ServerAdapter"


def _register_checkpoint_engine(_: ModuleType) -> None:
    import verl_fl.weight_sync.engine
    import verl_fl.weight_sync.gloo_engine  # noqa: F401  both register themselves, also when they were imported first


_HOOKS = {
    "verl.workers.engine.fsdp.transformer_impl": _register_engines,
    "verl.workers.rollout.replica": _register_replica,
    "verl.workers.rollout.base": _register_adapter,
    "verl.checkpoint_engine.base": _register_checkpoint_engine,
}

load()
