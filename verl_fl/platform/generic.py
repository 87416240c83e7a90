"""Any device that torch itself reports and no other file here knows. What torch can't say is guessed by convention."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Any, ClassVar

from verl_fl._errors import explain
from verl_fl.platform.base import Platform, Probe


def _device() -> str:
    """torch's own word for the accelerator of this machine, or ``""``. Imports torch only where one may exist."""
    extended = any(point.name != "flagcx" for point in entry_points(group="torch.backends"))  # that one is no device
    if "torch" not in sys.modules and not extended and sys.platform != "darwin":
        return ""
    import torch

    device = torch.accelerator.current_accelerator()
    return device.type if device is not None else ""


class GenericPlatform(Platform):
    """Taken only where no other platform is found."""

    name = "generic"
    features = {"fsdp1": (False, "FSDP1 was not tried; FSDP2 works")}
    device_name: ClassVar[Any] = property(lambda self: _device())
    vendor_name: ClassVar[Any] = property(lambda self: f"generic{self.device_name}")
    visible_devices: ClassVar[Any] = property(lambda self: f"{self.device_name.upper()}_VISIBLE_DEVICES")
    ray_resource: ClassVar[Any] = property(lambda self: self.device_name.upper())

    @classmethod
    def probe(cls) -> Probe:
        """torch is asked, where a package extends it."""
        device = _device()
        known = device in ("", "cuda", "npu", "musa", "xpu", "mlu")
        reason = f"torch reports {device or 'no accelerator'}" + (
            ", which has a file of its own" if device and known else ""
        )
        return Probe(found=not known, reason=reason)

    @property
    def collective(self) -> str:  # type: ignore[override]
        """The backend that torch has registered for the device."""
        from torch.distributed import Backend

        backend = Backend.default_device_backend_map.get(self.device_name)
        if backend is None:
            problem = f"torch has no collective library for {self.device_name!r} tensors"
            legal = ", ".join(sorted(Backend.default_device_backend_map))
            raise RuntimeError(explain(problem, legal=legal, fix="write a platform file: verl_fl/platform/README.md"))
        return backend
