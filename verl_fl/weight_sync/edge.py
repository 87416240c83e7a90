"""Buckets on their way to the next end: bounded queues, one thread a connection, any error ends the whole sync.

A sender and a relaying receiver have the same edges. A :class:`StreamEdge` writes each bucket into the sockets of one
peer; a :class:`RingEdge` writes it once into shared memory that all its peers on this host read.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from verl_fl.weight_sync import memory, pump
from verl_fl.weight_sync._errors import SyncError
from verl_fl.weight_sync.link import BUCKET, IN_RING, RELEASE, Frame, Link
from verl_fl.weight_sync.ring import Ring

DEPTH = 3
"""Buckets that may wait before each thread: what a stage may hold."""


class Bucket:
    """One bucket's bytes, where they lie, and what is known of them.

    Args:
        index: its number in the manifest.
        parts: memoryviews of its bytes in order.
        flags: of its frame.
        meta: of its frame.
        known: its checksum, where it has come with one.
        pieces: its tensors' parts as ``(uint8 tensor, size of an element, offset in the bucket)``.
        keep: what owns the memory.
        release: called once, when no edge needs the memory any more.

    Attributes:
        prepare: run once, by the first thread that sends the bucket.
        delta: what edges send that carry changes only.
    """

    def __init__(
        self,
        index: int,
        parts: Sequence[Any],
        *,
        flags: int = 0,
        meta: bytes = b"",
        known: int | None = None,
        pieces: Sequence[tuple[Any, int, int]] = (),
        keep: Any = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.index, self.parts, self.flags, self.meta = index, parts, flags, meta
        self.size = sum(len(part) for part in parts)
        self.pieces, self.keep = pieces, keep
        self.prepare: Callable[[], None] | None = None
        self.delta: Bucket | None = None
        self._known, self._release = known, release
        self._users = 1
        self._lock = threading.Lock()

    def checksum(self) -> int:
        """Of its bytes; the first caller pays."""
        with self._lock:
            if self._known is None:
                self._known = memory.checksum(self.parts)
            return self._known

    def ready(self, *, delta: bool) -> Bucket:
        """What is to be sent; the first caller makes it."""
        with self._lock:
            if self.prepare is not None:
                self.prepare()
                self.prepare = None
        return self.delta if delta and self.delta is not None else self

    def hold(self) -> None:
        """One user more."""
        with self._lock:
            self._users += 1

    def drop(self) -> None:
        """One user less; the last one frees the memory."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            for sent in (self, self.delta):
                if sent is not None:
                    sent.parts, sent.pieces, sent.keep = [], (), None
            if self._release is not None:
                self._release()


class Run:
    """Buckets that lie still in plain host memory: they are queued at once, and moved by compiled loops.

    Args:
        keep: what owns the memory.
    """

    def __init__(self, layout: pump.Layout, buckets: Sequence[int], keep: Any = None) -> None:
        self.layout, self.buckets, self.keep = layout, buckets, keep
        self.size = sum(layout.size(bucket) for bucket in buckets)

    def drop(self) -> None:
        """Nothing is to be freed."""


class Edge:
    """A way out, for one sync; ``offer`` buckets in order, then ``finish``.

    Args:
        sync: the sync's number.
        lanes: what each thread of the edge runs on.
        on_error: told the first error, from any thread.
    """

    transport = ""
    delta = False
    """Whether any peer of the edge gets changes only."""

    def __init__(self, sync: int, lanes: int, on_error: Callable[[BaseException], None]) -> None:
        self.sync = sync
        self.busy_s = 0.0
        """Seconds its threads spent sending, all together."""
        self.sent_bytes = 0
        self._on_error = on_error
        self._failed = False
        self._queues: list[queue.Queue[Bucket | Run | None]] = [queue.Queue(DEPTH) for _ in range(lanes)]
        self._next = 0
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"verl-fl-edge-{lane}", daemon=True)
            for lane in range(lanes)
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, bucket: Bucket) -> None:
        """Queue a bucket, waiting while the queue is full; lanes take turns. A failed edge takes and forgets."""
        bucket.hold()
        lane, self._next = self._next, (self._next + 1) % len(self._queues)
        self._put(lane, bucket)

    def offer_run(self, run: Run) -> None:
        """Queue all of a run, shared among the lanes."""
        lanes = len(self._queues)
        for lane in range(lanes):
            self._put(lane, Run(run.layout, run.buckets[lane::lanes], run.keep))

    def finish(self, look: Callable[[], None]) -> None:
        """Return when all that was offered has left, or the edge has failed; ``look`` is called now and then."""
        for lane in range(len(self._queues)):
            self._put(lane, None)
        for thread in self._threads:
            while thread.is_alive():
                thread.join(0.2)
                look()

    def abort(self) -> None:
        """Stop; queued buckets are dropped. The connections are closed by their owner, which wakes the threads."""
        self._failed = True

    def join(self) -> None:
        """After :meth:`abort` and the end of the connections: return when no thread reads a bucket any more."""
        for thread in self._threads:
            thread.join()

    def _put(self, lane: int, item: Bucket | Run | None) -> None:
        while not self._failed:
            try:
                self._queues[lane].put(item, timeout=0.2)
                return
            except queue.Full:
                continue
        if item is not None:
            item.drop()

    def _take(self, lane: int) -> Bucket | Run | None:
        while not self._failed:
            try:
                return self._queues[lane].get(timeout=0.2)
            except queue.Empty:
                continue
        return None

    def _run(self, lane: int) -> None:
        bucket = None
        try:
            while (bucket := self._take(lane)) is not None:
                begin = time.perf_counter()
                if isinstance(bucket, Run):
                    self._send_run(lane, bucket)
                else:
                    self._send(lane, bucket)
                self.busy_s += time.perf_counter() - begin
                bucket.drop()
            if not self._failed:
                self._drain(lane)
        except BaseException as error:
            self._failed = True
            if bucket is not None:
                bucket.drop()
            self._on_error(error)
        finally:
            while not self._queues[lane].empty():
                left = self._queues[lane].get()
                if left is not None:
                    left.drop()

    def _send(self, lane: int, bucket: Bucket) -> None:
        raise NotImplementedError

    def _send_run(self, lane: int, run: Run) -> None:
        raise NotImplementedError

    def _drain(self, lane: int) -> None:
        """After the last bucket."""


class StreamEdge(Edge):
    """Sockets to one peer; the bytes go from where they lie into the kernel.

    Args:
        links: one a lane.
        delta: the peer gets changes only.
    """

    def __init__(
        self,
        transport: str,
        sync: int,
        links: Sequence[Link],
        on_error: Callable[[BaseException], None],
        *,
        delta: bool,
    ) -> None:
        self.transport, self.delta, self._links = transport, delta, links
        super().__init__(sync, len(links), on_error)

    def _send(self, lane: int, bucket: Bucket) -> None:
        ready = bucket.ready(delta=self.delta)
        frame = Frame(BUCKET, self.sync, ready.size, ready.index, 0, ready.flags, ready.checksum(), ready.meta)
        self._links[lane].send_frame(frame, ready.parts)
        self.sent_bytes += ready.size

    def _send_run(self, lane: int, run: Run) -> None:
        self._links[lane].send_buckets(run.layout, self.sync, run.buckets)
        self.sent_bytes += run.size


class RingEdge(Edge):
    """Shared memory, written once for all local peers; their sockets carry only which slot to read, and its release.

    Args:
        links: to those that get all, and to those that get changes only.
    """

    transport = "shm"

    def __init__(
        self,
        sync: int,
        ring: Ring,
        links: tuple[Sequence[Link], Sequence[Link]],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._ring, self._links = ring, links
        self.delta = bool(links[1])
        self._free = list(range(ring.num_slots))
        self._readers: dict[int, Sequence[Link]] = {}
        """Who has still to release a slot, in the order in which the slots were filled."""
        super().__init__(sync, 1, on_error)

    def _send(self, lane: int, bucket: Bucket) -> None:
        for delta in (False, True):
            if self._links[delta]:
                self._fill(bucket.ready(delta=delta), self._links[delta])

    def _send_run(self, lane: int, run: Run) -> None:
        links = self._links[0]
        with contextlib.ExitStack() as stack:
            fds = (ctypes.c_int * len(links))(*(stack.enter_context(link.own_descriptor()) for link in links))
            hasher = pump.Hasher()
            for index in run.buckets:
                if not self._free:
                    self._collect_run(fds, hasher)
                slot = self._free.pop()
                view = self._ring.slot(slot)
                pump.gather(hasher, run.layout, index, view)
                view.release()
                self._readers[slot] = links
                code = pump.announce(fds, hasher, run.layout, self.sync, index, slot)
                if code != pump.DONE:
                    raise SyncError(f"a reader of shared memory is gone: {os.strerror(code)}", phase="buckets")
                self.sent_bytes += run.layout.size(index)
            while self._readers:
                self._collect_run(fds, hasher)

    def _collect_run(self, fds: Any, hasher: pump.Hasher) -> None:
        """As :meth:`_collect`, by a compiled loop."""
        slot, links = next(iter(self._readers)), self._links[0]
        progress = pump.Progress()
        before = (-1, -1)
        while (code := pump.collect(fds, hasher, self.sync, slot, progress)) != pump.DONE:
            link = links[progress.bucket]
            if code == pump.CLOSED:
                raise SyncError("the peer closed the connection", phase="wait", peer=link.peer)
            if code == pump.STRANGE:
                raise SyncError(
                    f"another frame came where slot {slot} was to be released", phase="buckets", peer=link.peer
                )
            before = link.pumped(code, before, (progress.bucket, progress.at), "released no shared memory")
        del self._readers[slot]
        self._free.append(slot)

    def _fill(self, bucket: Bucket, links: Sequence[Link]) -> None:
        slot = self._slot()
        view, at = self._ring.slot(slot), 0
        for part in bucket.parts:
            memory.copy(view[at : at + len(part)], part)
            at += len(part)
        view.release()
        frame = Frame(BUCKET, self.sync, bucket.size, bucket.index, 0, bucket.flags, bucket.checksum(), bucket.meta)
        self._announce(slot, frame, links)

    def _slot(self) -> int:
        while not self._free:
            self._collect()
        return self._free.pop()  # the one that was used last is still in the cache

    def _announce(self, slot: int, frame: Frame, links: Sequence[Link]) -> None:
        """Tell the readers of a slot that it is full."""
        self.sent_bytes += frame.size
        frame.value, frame.size, frame.flags = slot << 32 | frame.size, 0, frame.flags | IN_RING
        self._readers[slot] = links
        for link in links:
            link.send_frame(frame)

    def _collect(self) -> None:
        """Read a release of the slot that was filled first from each of its readers; they release in that order."""
        slot = next(iter(self._readers))
        for link in self._readers[slot]:
            frame = link.receive()
            if frame.kind != RELEASE or frame.sync != self.sync or frame.index != slot:
                raise SyncError(f"released slot {frame.index} instead of {slot}", phase="buckets", peer=link.peer)
        del self._readers[slot]
        self._free.append(slot)

    def _drain(self, lane: int) -> None:
        while self._readers:
            self._collect()
