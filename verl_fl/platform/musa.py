"""Moore Threads MUSA. Its runtime reads its mask once, when torch_musa is imported; CUDA's mask means nothing to it."""

from __future__ import annotations

from typing import Any

from verl_fl.platform.base import Platform


class MUSAPlatform(Platform):
    """Moore Threads GPUs. torch_musa and torchada may dress ``torch.cuda`` up as theirs; nothing here asks it."""

    name = device_name = flagcx = "musa"
    aliases = ("mthreads",)
    vendor_name = "mthreads"
    sdk = "torch_musa"
    collective = "mccl"
    visible_devices = "MUSA_VISIBLE_DEVICES"
    mask_aliases = ("CUDA_VISIBLE_DEVICES",)
    mask_read = "import"
    ray_resource = "MUSA"
    smi_tool = "mthreads-gmi"
    pci_vendor = "0x1ed5"
    device_nodes = "/dev/mtgpu*"
    features = {
        "flash_attention_2": (False, "FlashAttention has no MUSA kernel; torch_musa's sdpa is used"),
    }

    def on_load(self, module: Any) -> Any:
        """FlagCX's Python wrapper up to 0.13 reads ``cuda_stream`` even where it then uses ``musa_stream``."""
        stream = module.Stream
        if not hasattr(stream, "cuda_stream"):
            stream.cuda_stream = property(lambda self: self.musa_stream)
        return module
