"""MetaX (MACA). Its torch calls the device ``cuda`` and answers as CUDA does; only the build's name tells it apart."""

from __future__ import annotations

from typing import ClassVar

from verl_fl.platform import evidence
from verl_fl.platform.base import Probe
from verl_fl.platform.cuda import CUDAPlatform


class MetaXPlatform(CUDAPlatform):
    """MetaX C500 and later. They come with an ``nvidia-smi`` of their own, which proves nothing."""

    name = vendor_name = flagcx = "metax"
    aliases: ClassVar[tuple[str, ...]] = ()
    verl_name = ""
    smi_tool = "mx-smi"
    pci_vendor = "0x9999"
    device_nodes = "/dev/mxcd"
    mask_uuids = False

    @classmethod
    def probe(cls) -> Probe:
        """A torch built for MACA is installed on MetaX machines and nowhere else, head nodes included."""
        hardware, version = cls.hardware(), evidence.torch_build()["version"]
        if evidence.torch_maker() == "metax":
            return Probe(
                found=True, reason=f"torch {version} is built for MACA" + (f"; {hardware}" if hardware else "")
            )
        lacks = f"torch {version or '(not installed)'} is not built for MACA"
        return Probe(found=False, reason=f"{hardware}, but {lacks}" if hardware else lacks, unusable=bool(hardware))
