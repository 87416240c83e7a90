"""SimY's SDK: importing it makes ``torch.simy`` a device."""

from verl_fl.testing.simulated import Chip, install

install(Chip(name="simy", vendor="zenith", device_count=2, bf16=False))
