"""NVIDIA CUDA. Its runtime reads the mask at first use and cuts the list at the first id that it does not know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

from verl_fl.platform import evidence
from verl_fl.platform.base import Platform, Probe

_DRIVER = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1")


class CUDAPlatform(Platform):
    """NVIDIA GPUs."""

    name = device_name = "cuda"
    aliases: ClassVar[tuple[str, ...]] = ("nvidia",)
    verl_name = vendor_name = flagcx = "nvidia"
    collective = "nccl"
    visible_devices = "CUDA_VISIBLE_DEVICES"
    mask_uuids = True
    ray_resource = "GPU"
    smi_tool = "nvidia-smi"
    pci_vendor = "0x10de"
    device_nodes = "/dev/nvidia[0-9]*"
    ipc = True

    @classmethod
    def probe(cls) -> Probe:
        """The driver is the proof, and a torch built for CUDA makes it usable; torch itself is installed anywhere."""
        driver = "an NVIDIA driver is loaded" if any(map(evidence.exists, _DRIVER)) else cls.hardware()
        build = evidence.torch_build()["cuda"] if evidence.torch_maker() == "cuda" else ""
        if not driver:
            return Probe(
                found=False, reason="no NVIDIA driver: neither /proc/driver/nvidia, its device files nor a card"
            )
        if not build:
            lacks = f"this torch ({evidence.torch_build()['version'] or 'not installed'}) is not built for CUDA"
            return Probe(found=False, reason=f"{driver}, but {lacks}", unusable=True)
        return Probe(found=True, reason=f"{driver} and torch is built for CUDA {build}")

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """A range in Nsight's timeline."""
        with self.device_module.nvtx.range(msg):
            yield

    def profiler_start(self) -> None:
        """Start Nsight's capture range."""
        self.device_module.profiler.start()

    def profiler_stop(self) -> None:
        """End Nsight's capture range."""
        self.device_module.profiler.stop()

    def cudart(self) -> Any:
        """The CUDA runtime."""
        return self.device_module.cudart()
