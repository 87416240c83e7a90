"""What a sync did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class Report:
    """One sync, as one end saw it."""

    version: int = 0
    """The model's version that the sender named."""
    mode: str = "full"
    """``full``, ``delta``, or ``mixed`` where some receivers got one and some the other."""
    num_tensors: int = 0
    num_bytes: int = 0
    """Of the model; what a delta saved is still counted."""
    wire_bytes: int = 0
    """What this end sent (a receiver: got) in buckets."""
    seconds: float = 0.0
    """From the call to the last confirmation."""
    changed: float = 1.0
    """Share of the elements that changed; 1 where it is not known."""
    edges: dict[str, str] = field(default_factory=dict)
    """Transport by peer."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds that each stage was busy; they overlap."""
    overflowed: dict[str, int] = field(default_factory=dict)
    """Values by tensor that were finite and no longer are after the cast to the receiver's dtype."""

    @property
    def gbps(self) -> float:
        """Gigabytes (1e9) of model a second."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def metrics(self) -> dict[str, float]:
        """For a trainer's log, under ``weight_sync/``."""
        found = {
            "bytes": float(self.num_bytes),
            "wire_bytes": float(self.wire_bytes),
            "seconds": self.seconds,
            "gbps": self.gbps,
            "changed_fraction": self.changed,
            "delta": float(self.mode != "full"),
            "overflowed": float(sum(self.overflowed.values())),
        }
        found |= {f"share/{name}": s / self.seconds for name, s in self.stages.items() if self.seconds}
        for transport in set(self.edges.values()):
            found[f"edges/{transport}"] = float(sum(t == transport for t in self.edges.values()))
        return {f"weight_sync/{name}": value for name, value in found.items()}

    def __str__(self) -> str:
        ways = ", ".join(f"{peer} by {transport}" for peer, transport in self.edges.items())
        return (
            f"version {self.version}: {self.num_tensors} tensors, {self.num_bytes / 1e6:.1f} MB ({self.mode}, "
            f"{self.wire_bytes / 1e6:.1f} MB sent) in {self.seconds:.3f} s, {self.gbps:.2f} GB/s; {ways}"
        )
