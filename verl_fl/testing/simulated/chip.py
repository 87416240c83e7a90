"""What a simulated chip is like: its names, its size, what it can't do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """A chip made of host memory. Everything a vendor would choose has a switch."""

    name: str
    """torch's device type, such as ``simx``: lower-case letters and digits."""

    vendor: str
    """Who is said to make it."""

    device_count: int = 4
    """Devices of the machine; a mask can show a process fewer."""

    memory_bytes: int = 1 << 30
    """Memory of each device. A tensor beyond it raises ``torch.OutOfMemoryError``."""

    bf16: bool = True
    """Whether bfloat16 tensors can exist on it."""

    copy_bytes_per_s: float = 0.0
    """Speed of each copy engine; a device has one for each direction. 0: as fast as the host copies."""

    lag_s: float = 0.002
    """How much later than its caller each piece of work on a side stream starts."""

    strict: bool = True
    """Raise where a stream uses what another may still be writing, whether or not it went well this time."""

    def __post_init__(self) -> None:
        if not (self.name.isalnum() and self.name.islower()):
            raise ValueError(f"a chip's name is lower-case letters and digits, not {self.name!r}")
        if not 1 <= self.device_count <= 64:
            raise ValueError(f"a machine has 1 to 64 simulated devices, not {self.device_count}")

    @property
    def collective(self) -> str:
        """Name of its torch.distributed backend. gloo does the work, on device tensors only."""
        return f"{self.name}ccl"

    @property
    def mask(self) -> str:
        """The variable that hides devices, read once, when the chip's SDK is imported."""
        return f"{self.name.upper()}_VISIBLE_DEVICES"
