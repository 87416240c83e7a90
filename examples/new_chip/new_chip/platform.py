"""All that verl-fl must know of the chip: what differs from any other torch device."""

from verl_fl.platform import Platform


class NewChip(Platform):
    """The example's chip: simulated, so that it runs on any machine. Put your chip's words in the place of these."""

    name = "newchip"  # VERL_PLATFORM=newchip
    device_name = "newchip"  # torch.device("newchip")
    vendor_name = "example"
    sdk = "new_chip.torch_newchip"  # imported when the device is first used; that it is installed is the evidence
    collective = "newchipccl"  # torch.distributed's backend
    visible_devices = "NEWCHIP_VISIBLE_DEVICES"
    mask_read = "import"  # the SDK reads its mask once, when it is imported
    ray_resource = "NEWCHIP"
    features = {
        "flash_attention_2": (False, "no kernel for this chip yet"),
        "fsdp1": (False, "FSDP1 was not tried; FSDP2 works"),
    }
