"""Huawei Ascend. Its runtime reads the mask at first use and leaves out ids that don't exist."""

from __future__ import annotations

from typing import Any

from verl_fl.platform.base import Platform


class NPUPlatform(Platform):
    """Ascend NPUs. verl's own class knows which CANN versions share memory handles; without verl nobody asks."""

    name = device_name = "npu"
    aliases = ("huawei", "ascend")
    verl_name = vendor_name = "huawei"
    sdk = "torch_npu"
    collective = "hccl"
    flagcx = "ascend"
    visible_devices = "ASCEND_RT_VISIBLE_DEVICES"
    ray_resource = "NPU"
    smi_tool = "npu-smi"
    pci_vendor = "0x19e5"
    device_nodes = "/dev/davinci[0-9]*"
    features = {
        "flash_attention_2": (True, "transformers routes flash_attention_2 to torch_npu's own kernel"),
    }

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """torch_npu may answer None."""
        return super().get_device_capability(device_index) or (None, None)

    def set_allocator_settings(self, settings: str) -> None:
        """torch_npu knows them since 2.9 and raises before."""
        memory: Any = getattr(self.device_module, "memory", None)
        if hasattr(memory, "_set_allocator_settings"):
            memory._set_allocator_settings(settings)
