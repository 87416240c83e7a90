"""verl's own platform lookup, sent through verl-fl's detection."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import psutil

from verl_fl import _env, _verl
from verl_fl.patches.ledger import patch
from verl_fl.platform.base import Platform, Probe
from verl_fl.platform.manager import Detection, ProbeFn, detect

logger = logging.getLogger("verl_fl.platform")


def detection() -> Detection:
    """Detect over all platforms in verl's registry: verl-fl's, those of packages that build on it, and any others."""
    from verl.plugin.platform.platform_manager import PlatformRegistry

    registered: dict[str, Any] = {name: PlatformRegistry.get(name) for name in PlatformRegistry.registered_names()}
    ours = {name: cls for name, cls in registered.items() if issubclass(cls, Platform) and name == cls.name}
    replaced = {cls.verl_name for cls in ours.values()}  # verl's own classes for chips that verl-fl has a file for
    foreign: dict[str, ProbeFn] = {
        name: functools.partial(_probe_stock, cls)
        for name, cls in registered.items()
        if name not in ours and name not in replaced
    }
    return detect(foreign, classes=ours)


def _probe_stock(platform_cls: Any) -> Probe:
    found = bool(platform_cls().is_platform_available(use_smi_check=True))
    return Probe(found=found, reason=f"verl's {platform_cls.__name__}.is_platform_available()")


@patch(
    target="verl.plugin.platform.platform_manager:_detect_platform_name",
    why="verl has no cpu platform and falls back to nvidia on a machine without accelerators; its detection gives no "
    "reasons and takes the first of two vendors",
    reference="case head-without-device; verl/plugin/platform/platform_manager.py",
    remove_when="verl's detection separates identity from visibility and falls back to cpu",
)
def platform_detection(original: Callable) -> Callable:
    @functools.wraps(original)
    def _detect_platform_name() -> str:
        found = detection()
        logger.info("platform: %s (%s)", found.name, found.reason)
        return found.name

    return _detect_platform_name


@patch(
    target="verl.utils.device:auto_set_device",
    why="verl overwrites trainer.device=cpu with whatever it detects, and leaves 'cuda' in place on a CPU",
    reference="case head-without-device; verl/utils/device.py",
    remove_when="verl treats an explicit cpu as a choice and follows the platform otherwise",
)
def explicit_device(original: Callable) -> Callable:
    @functools.wraps(original)
    def auto_set_device(config: Any) -> None:
        device = getattr(getattr(config, "trainer", None), "device", None)
        if device is None:
            return
        name = _verl.current_platform().device_name
        if device == "cpu" and name != "cpu":
            from verl.plugin.platform import platform_manager, set_platform

            logger.warning("platform: cpu instead of %s, because trainer.device=cpu was given", name)
            cpu = platform_manager.PlatformRegistry.get("cpu")
            assert cpu is not None, "the plugin registers it"
            set_platform(cpu())
        elif device != name:
            config.trainer.device = name

    return auto_set_device


@patch(
    target="verl.trainer.constants_ppo:get_ppo_ray_runtime_env",
    why="verl does not tell its workers which platform the driver was told to use, and may hand the driver's own "
    "device mask to workers on other nodes",
    reference="cases plugin-in-workers and leaked-mask; verl/trainer/constants_ppo.py",
    remove_when="verl forwards VERL_PLATFORM as a wish and never forwards a visibility mask",
)
def runtime_environment(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_ppo_ray_runtime_env(*args: Any, **kwargs: Any) -> dict:
        _drop_masks(_env_vars_of(args[0] if args else kwargs.get("config")))
        runtime_env = original(*args, **kwargs)
        env_vars = runtime_env.setdefault("env_vars", {})
        _drop_masks(env_vars)
        found = detection()
        on_cpu = _verl.current_platform().device_name == "cpu"  # perhaps by trainer.device=cpu, see explicit_device
        if found.explicit or (on_cpu and found.name != "cpu"):
            env_vars[_env.DRIVER_PLATFORM] = "cpu" if on_cpu else found.name
        env_vars.update({name: _env.read(name) for name in _env.FORWARDED if _env.read(name)})
        if on_cpu and not _env.read("TQ_NUM_THREADS"):
            # Its storage processes do not load verl, so the patch on TransferQueue's threads is not there to help.
            env_vars["TQ_NUM_THREADS"] = str(min(8, psutil.cpu_count(logical=False) or 1))
        return runtime_env

    return get_ppo_ray_runtime_env


def _env_vars_of(config: Any) -> Any:
    """The user's own ``ray_kwargs.ray_init.runtime_env.env_vars``, which verl merges over what is returned here."""
    found = config
    for name in ("ray_kwargs", "ray_init", "runtime_env", "env_vars"):
        found = found.get(name) if found else None
    return {} if found is None else found


def _drop_masks(env_vars: Any) -> None:
    from omegaconf import DictConfig, open_dict

    for name in [name for name in env_vars if _is_mask(name)]:
        logger.warning("platform: %s=%s is not forwarded: it would hide devices on every node", name, env_vars[name])
        with open_dict(env_vars) if isinstance(env_vars, DictConfig) else contextlib.nullcontext():
            del env_vars[name]


_MASK = re.compile(
    r"(?!RAY_).*(_VISIBLE_(DEVICES|MODULES|CORES|CHIPS)|_AFFINITY_MASK|_DEVICE_SELECTOR|_DEVICE_ORDINAL)"
)


def _is_mask(name: str) -> bool:
    """Whether a variable of this name hides devices, by the vendors' habits and by what the platforms say."""
    return bool(_MASK.fullmatch(name)) or name in _masks()


def _masks() -> set[str]:
    from verl.plugin.platform import PlatformRegistry

    registered: list[Any] = [PlatformRegistry.get(name) for name in PlatformRegistry.registered_names()]
    platforms = [cls() for cls in registered if issubclass(cls, Platform)]
    return {mask for platform in platforms for mask in (platform.visible_devices, *platform.mask_aliases)}
