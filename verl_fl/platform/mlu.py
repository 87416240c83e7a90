"""Cambricon MLU. Its runtime reads the mask at first use."""

from __future__ import annotations

from verl_fl.platform.base import Platform


class MLUPlatform(Platform):
    """Cambricon MLU370 and later."""

    name = device_name = "mlu"
    aliases = ("cambricon",)
    vendor_name = flagcx = "cambricon"
    sdk = "torch_mlu"
    collective = "cncl"
    visible_devices = "MLU_VISIBLE_DEVICES"
    ray_resource = "MLU"
    smi_tool = "cnmon"
    pci_vendor = "0xcabc"
    device_nodes = "/dev/cambricon_dev[0-9]*"
    features = {
        "flash_attention_2": (False, "FlashAttention has no MLU kernel; torch_mlu's sdpa is used"),
        "fsdp1": (False, "FSDP1 was not tried on MLU; FSDP2 works"),
    }
