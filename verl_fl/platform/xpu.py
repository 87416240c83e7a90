"""Intel XPU. The driver reads ``ZE_AFFINITY_MASK`` at first use; ids may name tiles, which verl-fl does not use."""

from __future__ import annotations

from verl_fl.platform import evidence
from verl_fl.platform.base import Platform, Probe


class XPUPlatform(Platform):
    """Intel Data Center GPU Max, Arc."""

    name = device_name = "xpu"
    aliases = ("intel",)
    vendor_name = "intel"
    collective = "xccl"
    visible_devices = "ZE_AFFINITY_MASK"
    ray_resource = "GPU"
    smi_tool = "xpu-smi"
    pci_vendor = "0x8086"
    features = {
        "flash_attention_2": (False, "FlashAttention has no XPU kernel; torch's sdpa is used"),
        "fsdp1": (False, "FSDP1 was not tried on XPU; FSDP2 works"),
    }

    @classmethod
    def probe(cls) -> Probe:
        """A torch built for XPU is installed on purpose. A card is no proof: most Intel processors carry one."""
        version = evidence.torch_build()["xpu"]
        if version:
            return Probe(found=True, reason=f"torch is built for XPU {version}")
        return Probe(found=False, reason="torch is not built for XPU")

    def ray_noset_envvars(self) -> list[str]:
        """Ray masks Intel GPUs through the SYCL runtime's variable."""
        return ["RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR"]
