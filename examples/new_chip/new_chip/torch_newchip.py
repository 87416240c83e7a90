"""What a vendor's own torch package does when it is imported. Here: the simulated device under another name."""

from verl_fl.testing.simulated import Chip, install

install(Chip(name="newchip", vendor="example", device_count=3, memory_bytes=2 << 30))
