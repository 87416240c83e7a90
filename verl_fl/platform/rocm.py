"""AMD ROCm. Its torch calls the device ``cuda``; verl keeps the mask in CUDA's variable, which HIP reads as well."""

from __future__ import annotations

from verl_fl.platform import evidence
from verl_fl.platform.base import Probe
from verl_fl.platform.cuda import CUDAPlatform


class ROCmPlatform(CUDAPlatform):
    """AMD Instinct and Radeon."""

    name = "rocm"
    aliases = ("amd",)
    verl_name = vendor_name = flagcx = "amd"
    smi_tool = "rocm-smi"
    pci_vendor = "0x1002"
    device_nodes = "/dev/kfd"

    @classmethod
    def probe(cls) -> Probe:
        """A torch built for HIP is installed on AMD machines and nowhere else. A graphics card alone is no proof."""
        version, driver = evidence.torch_build()["hip"], evidence.device_nodes(cls.device_nodes)
        if version:
            return Probe(
                found=True, reason=f"torch is built for HIP {version}" + ("; /dev/kfd is there" if driver else "")
            )
        lacks = "torch is not built for HIP"
        return Probe(found=False, reason=f"/dev/kfd is there, but {lacks}" if driver else lacks, unusable=bool(driver))

    def ray_noset_envvars(self) -> list[str]:
        """Ray has three names for an AMD mask."""
        return [f"RAY_EXPERIMENTAL_NOSET_{mask}_VISIBLE_DEVICES" for mask in ("CUDA", "HIP", "ROCR")]
