"""What ends a sync: one error that names phase, peer and tensor, and carries what the peer itself said."""

from __future__ import annotations


class SyncError(RuntimeError):
    """A sync failed; nothing of it counts, and the next one may be tried at once.

    Attributes:
        phase: what was being done (``dial``, ``handshake``, ``begin``, ``manifest``, ``buckets``, ``confirm``, ...).
        peer: the other end's address, ``""`` where none is involved.
        tensor: the tensor being moved, ``""`` where none is known.
    """

    def __init__(self, problem: str, *, phase: str, peer: str = "", tensor: str = "", fix: str = "") -> None:
        self.problem, self.phase, self.peer, self.tensor, self.fix = problem, phase, peer, tensor, fix
        where = [f"phase {phase}", f"peer {peer}" if peer else "", f"tensor {tensor}" if tensor else ""]
        super().__init__(
            f"weight sync failed: {problem}\n  where: {', '.join(filter(None, where))}"
            + (f"\n  do: {fix}" if fix else "")
        )

    def __reduce__(self) -> tuple:  # keyword arguments survive Ray's pickling
        return _rebuild, (self.problem, self.phase, self.peer, self.tensor, self.fix)


class Refused(SyncError):
    """The two ends do not belong together: versions or secrets differ. Trying again does not help."""


class BadFrame(SyncError):
    """Bytes from a peer that are not what the wire format allows."""


def _rebuild(problem: str, phase: str, peer: str, tensor: str, fix: str) -> SyncError:
    return SyncError(problem, phase=phase, peer=peer, tensor=tensor, fix=fix)
