"""Two ready-made vendors, written as any vendor writes a platform; see ``examples/new_chip`` for a package of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from verl_fl import _env
from verl_fl.platform.base import Platform, Probe


class _Simulated(Platform):
    """What the two have in common. Both are everywhere, unless ``VERL_FL_SIMULATED`` lists who is here."""

    features: ClassVar[Mapping[str, tuple[bool, str]]] = {
        "flash_attention_2": (False, "FlashAttention has no kernel for a simulated chip"),
        "fsdp1": (False, "FSDP1 was not tried on simulated chips; FSDP2 works"),
    }
    mask_read = "import"

    @classmethod
    def probe(cls) -> Probe:
        here = _env.read(_env.SIMULATED)
        if here and cls.name not in here.split(","):
            return Probe(found=False, reason=f"{_env.SIMULATED}={here}")
        return Probe(found=True, reason=f"simulated ({cls.sdk} can be imported)")


class SimX(_Simulated):
    """Four devices, bfloat16."""

    name = device_name = "simx"
    vendor_name = "acme"
    sdk = "verl_fl.testing.simulated.torch_simx"
    collective = "simxccl"
    visible_devices = "SIMX_VISIBLE_DEVICES"
    ray_resource = "SIMX"


class SimY(_Simulated):
    """Two devices, no bfloat16."""

    name = device_name = "simy"
    vendor_name = "zenith"
    sdk = "verl_fl.testing.simulated.torch_simy"
    collective = "simyccl"
    visible_devices = "SIMY_VISIBLE_DEVICES"
    ray_resource = "SIMY"
    features: ClassVar[Mapping[str, tuple[bool, str]]] = {
        **_Simulated.features,
        "bf16": (False, "the chip has no bfloat16"),
    }
