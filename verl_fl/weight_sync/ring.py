"""Shared memory of one host: a few slots, written by one end and read by any number of others.

The memory has no name (memfd) and travels as a file descriptor over a unix socket, so it is gone with the last process
that has it, however that one ends, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

from verl_fl.weight_sync._errors import BadFrame

SLOTS = 4


class Ring:
    """``num_slots`` slots of ``slot_bytes`` each; who may touch which is agreed over the sockets.

    Args:
        fd: the memory; the ring owns it.
    """

    def __init__(self, fd: int, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes, self.num_slots, self.fd = slot_bytes, num_slots, fd
        size = slot_bytes * num_slots
        self._map = mmap.mmap(fd, size)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, slot_bytes: int, num_slots: int = SLOTS) -> Ring:
        """New memory.

        Raises:
            OSError: the machine has none.
        """
        fd = os.memfd_create("verl-fl-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, slot_bytes * num_slots)
            return cls(fd, slot_bytes, num_slots)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def adopt(cls, fd: int, *, slot_bytes: int, num_slots: int) -> Ring:
        """Memory that another process made; the ring owns ``fd`` from here on.

        Raises:
            BadFrame: it is smaller than was said, and reading it would kill this process.
        """
        if not 0 < num_slots <= 64 or not 0 < slot_bytes <= 1 << 31 or os.fstat(fd).st_size < slot_bytes * num_slots:
            os.close(fd)
            raise BadFrame(f"a ring of {num_slots} slots of {slot_bytes} bytes came with less memory", phase="buckets")
        try:
            return cls(fd, slot_bytes, num_slots)
        except BaseException:
            os.close(fd)
            raise

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot."""
        return self._view[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def describe(self) -> tuple[int, int, int]:
        """Address, bytes of a slot, number of slots."""
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(self._map)), self.slot_bytes, self.num_slots

    def close(self) -> None:
        """Unmap; a view that is still out keeps the memory until it goes. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._view.release()
            with contextlib.suppress(BufferError):  # a slot's view is still out; the map goes with it
                self._map.close()
