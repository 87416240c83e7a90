"""The process in which checks run: ``python -m ..._child FD LIMIT_S START END TARGET CHECK...``."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from verl_fl._errors import explain
from verl_fl.testing._target import load
from verl_fl.testing.conformance import CHECKS, _place
from verl_fl.testing.conformance._check import Failed
from verl_fl.testing.conformance.runner import answer


def main(fd: int, limit_s: float, start: float, end: float, target: str, names: list[str]) -> None:
    """Import the target, say what it is, then answer the checks one by one.

    Args:
        fd: the pipe to the parent.
        limit_s: the parent's patience with each answer.
        start: when it began to wait for the first, on this machine's monotonic clock.
        end: when it loses patience with all, on the same.
    """
    stacks = os.dup(2)  # a platform may close or replace stderr
    faulthandler.enable(stacks)

    def tell(**message: Any) -> None:
        os.write(fd, json.dumps(message).encode() + b"\n")

    def watch(start: float) -> float:
        limit = max(0.1, min(start + limit_s, end) - time.monotonic())
        faulthandler.dump_traceback_later(limit * 0.95, file=stacks)
        return limit

    watch(start)
    try:
        cls = load(target)
    except BaseException as error:  # said to the parent, whatever it is
        return tell(unusable=str(error) or type(error).__name__)
    try:
        platform: Any = cls()
        about = describe(platform)
    except Failed as problem:
        return tell(unusable=str(problem))
    except BaseException as error:
        where = _place.raised(error)
        return tell(unusable=f"asking {target} what it is raised {type(error).__name__}: {error}{where}")
    tell(**about)
    for name in names:
        tell(asked=name)
        tell(**asdict(answer(CHECKS[name], platform, watch(time.monotonic()))))
    faulthandler.cancel_dump_traceback_later()


def describe(platform: Any) -> dict[str, Any]:
    """What the report says of the chip.

    Raises:
        Failed: this process can use none of its devices, so that there is nothing to ask.
    """
    import torch

    module, mask = platform.device_module, platform.visible_devices_envvar()
    if not platform.is_available() or platform.device_count() == 0:
        raise Failed(
            explain(
                f"platform {platform.name} has no device that this process can use",
                found=f"{platform.probe().reason}; {mask}={os.environ.get(mask, '(not set)')}",
                fix=f"run the kit on a machine with a {platform.vendor_name} chip, and let {mask} show it",
            )
        )
    chip = str(getattr(module, "get_device_name", lambda: platform.device_name)())
    about = {"name": platform.name, "vendor": platform.vendor_name, "device": platform.device_name, "chip": chip}
    simulated = type(module).__module__.startswith("verl_fl.testing.simulated")
    about["devices"] = str(platform.device_count())
    about["memory"] = _quiet(lambda: str(module.mem_get_info()[1]))
    about["sdk"] = _quiet(lambda: f"{platform.sdk} {sys.modules[platform.sdk].__version__}") or platform.sdk
    builds = vars(torch.version).items()
    about["torch_build"] = ", ".join(f"{k} {v}" for k, v in builds if k.isalpha() and isinstance(v, str))
    return {"platform": about, "torch": torch.__version__, "simulated": simulated}


def _quiet(fact: Callable[[], str]) -> str:
    """What not every platform can say."""
    with contextlib.suppress(Exception):
        return fact()
    return ""


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), sys.argv[5], sys.argv[6:])
    os._exit(0)  # an SDK's threads have no say in how long this takes
