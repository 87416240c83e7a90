"""SimX's SDK: importing it makes ``torch.simx`` a device."""

from verl_fl.testing.simulated import Chip, install

install(Chip(name="simx", vendor="acme", device_count=4))
