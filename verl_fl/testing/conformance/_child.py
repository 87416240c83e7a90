"""The process in which checks run: ``python -m verl_fl.testing.conformance._child FD TARGET CHECK...``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from verl_fl._errors import explain
from verl_fl.testing._target import load
from verl_fl.testing.conformance import CHECKS
from verl_fl.testing.conformance.runner import answer


def main(fd: int, target: str, names: list[str]) -> None:
    """Import the target, say what it is, then answer the checks one by one."""

    def tell(**message: Any) -> None:
        os.write(fd, json.dumps(message).encode() + b"\n")

    try:
        platform: Any = load(target)()
        about = describe(platform)
    except BaseException as error:  # said to the parent, whatever it is
        tell(unusable=str(error) or type(error).__name__)
        return
    tell(**about)
    for name in names:
        tell(asked=name)
        tell(**asdict(answer(CHECKS[name], platform)))


def describe(platform: Any) -> dict[str, Any]:
    """What the report says of the chip.

    Raises:
        RuntimeError: this process can use none of its devices, so that there is nothing to ask.
    """
    import torch

    module, mask = platform.device_module, platform.visible_devices_envvar()
    if not platform.is_available() or platform.device_count() == 0:
        raise RuntimeError(
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
    return {"platform": about, "torch": torch.__version__, "simulated": simulated}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
    os._exit(0)  # an SDK's threads have no say in how long this takes
