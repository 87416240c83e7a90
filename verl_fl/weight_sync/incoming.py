"""One sync as a receiver lives it: senders say what comes, buckets arrive on any lane, all agree, and it counts."""

from __future__ import annotations

import logging
import queue
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import xxhash

from verl_fl.weight_sync import delta, manifest, memory, pump
from verl_fl.weight_sync._errors import BadFrame, SyncError
from verl_fl.weight_sync.edge import Bucket, Edge
from verl_fl.weight_sync.link import (
    BEGIN,
    BUSY,
    COMMIT,
    CONFIRM,
    DELTA,
    DONE,
    END,
    ERROR,
    IN_RING,
    MANIFEST,
    PLAN,
    READY,
    RELEASE,
    STATE,
    TRAILER,
    Frame,
    Link,
)
from verl_fl.weight_sync.manifest import Manifest
from verl_fl.weight_sync.outlets import Below
from verl_fl.weight_sync.report import Report
from verl_fl.weight_sync.ring import Ring
from verl_fl.weight_sync.sink import Stream, Targets

if TYPE_CHECKING:
    from verl_fl.weight_sync.receiver import Receiver

logger = logging.getLogger("verl_fl.weight_sync")

MAX_RANKS, MAX_BUCKET_BYTES, MIN_BUCKET_BYTES = 65536, 1 << 31, 64
_DELTA_HEAD = struct.Struct("<Q")
_DELTA_PIECE = struct.Struct("<BI")


@dataclass(slots=True)
class Kept:
    """What the next sync of the same model need not make again."""

    meta: bytes = b""
    manifest: Manifest = field(default_factory=lambda: Manifest(MIN_BUCKET_BYTES))
    key: Any = None
    layout: pump.Layout | None = None


class Incoming:
    """The state of one sync; :meth:`take` is called by the data connections' threads, the rest by one thread.

    Attributes:
        sync: the sync's number.
        wrote: whether any byte of the sync was written where the weights are.
        committing: whether all ends have agreed, so that the old weights are gone.
        later: what belongs to the next sync.
        data_links: connections that have brought buckets.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver, self._sink = receiver, receiver.sink
        self.sync = -1
        self.wrote = self.committing = False
        self.later: list[tuple[Link, Frame]] = []
        self.data_links: set[Link] = set()
        self._ranks: dict[int, Link] = {}
        self._begins: dict[int, dict[str, Any]] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._deadline = float("inf")
        self._moved = self._told = 0.0
        self._looping = 0
        """Data connections that are inside of a compiled loop."""
        self._taking = 0
        """Data connections that are inside of a bucket."""
        self._manifest = Manifest(MIN_BUCKET_BYTES)
        self._whole = False
        self._got: dict[int, int] = {}
        """Checksum by bucket; not of those that a compiled loop took, which stand in the layout."""
        self._layout: pump.Layout | None = None
        self._busy: set[int] = set()
        self._ends: dict[int, dict[str, Any]] = {}
        self._edges: list[Edge] = []
        self._mode = "full"
        self._wire_bytes = self._changes = 0
        self._stages = {"receive": 0.0, "unpack": 0.0, "forward": 0.0}

    # --- the main thread ---

    def wait_for_senders(self, timeout_s: float | None) -> None:
        """Return when every rank of one sender has announced the same sync.

        Raises:
            SyncError: none or not all of them came in time, or they disagree.
        """
        limit = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        num_ranks = 0
        while not num_ranks or len(self._ranks) < num_ranks:
            what = "no sender came" if not self._ranks else f"only ranks {sorted(self._ranks)} of {num_ranks} came"
            link, event = self._next(lambda: limit, "begin", what)  # noqa: B023 - called at once
            self._raise_the_cause()
            if link is None:
                continue
            if event.kind != BEGIN:
                raise BadFrame(f"a frame of kind {event.kind} before a sync began", phase="begin", peer=link.peer)
            begin = _checked(event.json(), link)
            assert link.hello is not None
            if num_ranks and begin["ranks"] != num_ranks:
                raise SyncError(
                    f"one sender has {num_ranks} ranks, another {begin['ranks']}", phase="begin", peer=link.peer
                )
            num_ranks = begin["ranks"]
            if link.hello.rank >= num_ranks or link.hello.rank in self._ranks:
                raise SyncError(f"rank {link.hello.rank} of {num_ranks} came twice", phase="begin", peer=link.peer)
            self._ranks[link.hello.rank], self._begins[link.hello.rank] = link, begin
            limit = min(limit, time.monotonic() + self._receiver.timeout_s)
        self.sync = self._begins[0]["sync"]
        self._receiver.about = self._begins[0].get("about", {})
        versions = {begin["version"] for begin in self._begins.values()}
        if len(versions) > 1:
            raise SyncError(f"the sender's ranks send versions {sorted(versions)}", phase="begin")

    def run(self) -> Report:
        """From the plan to the commit."""
        begin = time.perf_counter()
        self._deadline = time.monotonic() + self._receiver.sync_limit_s
        for link in self._ranks.values():
            link.deadline = self._deadline
        self._ranks[0].send(STATE, self.sync, self._state())
        plan = self._expect(PLAN, "plan", {0})[0].json()
        self._set_up(plan)
        for rank, link in self._ranks.items():
            if rank:
                link.send(PLAN, self.sync, plan | {"me": self._receiver.below.as_dict()})
        self._ranks[0].send(READY, self.sync)
        self._collect()
        for edge in self._edges:
            edge.finish(self._raise_if_failed)
        if self._layout is not None:
            self._wire_bytes += self._manifest.num_bytes
            self._sink.all_done()
        self._sink.settle(self._look)
        self._raise_the_cause()
        self._confirm()
        self._expect(COMMIT, "commit", set(self._ranks))
        self.committing = True
        self._sink.commit()
        for link in self._ranks.values():
            try:
                link.send(DONE, self.sync)
            except SyncError as error:  # the weights are whole here, whatever has become of the sender
                logger.warning("weight sync: a sender did not hear that its weights are in use: %s", error)
        seconds = time.perf_counter() - begin
        self._receiver.speed = self._wire_bytes / max(self._stages["receive"], 1e-9)
        self._stages["forward"] = sum(edge.busy_s for edge in self._edges)
        elements = sum(e.num_bytes // e.dtype.itemsize for e in self._manifest.entries if e.alias_of < 0)
        return Report(
            version=self._begins[0]["version"],
            mode=plan["mode"],
            num_tensors=len(self._manifest.entries),
            num_bytes=self._manifest.num_bytes,
            wire_bytes=self._wire_bytes,
            seconds=seconds,
            changed=self._changes / max(elements, 1) if plan["mode"] == "delta" else 1.0,
            edges={link.peer: link.transport for link in self.data_links},
            stages=dict(self._stages),
        )

    def failed(self, error: BaseException) -> None:
        """From any thread: the sync is over."""
        if isinstance(error, Exception) and not isinstance(error, SyncError):
            cause = error
            error = SyncError(f"{type(cause).__name__}: {cause}", phase="buckets", peer=self._receiver.address)
            error.__cause__ = cause
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()
        self._receiver.events.put((None, None))  # type: ignore[arg-type]  # wakes the main thread

    def stop(self, error: BaseException) -> None:
        """Tell every sender why, and end all threads of the sync."""
        self.failed(error)
        said = error.problem if isinstance(error, SyncError) else f"{type(error).__name__}: {error}"
        body = {"error": said[:4000], "phase": getattr(error, "phase", ""), "tensor": getattr(error, "tensor", "")}
        for link in self._ranks.values():
            try:
                link.deadline = time.monotonic() + 1
                link.send(ERROR, max(self.sync, 0), body)
            except (SyncError, OSError):
                pass  # it is gone, and learns of the failure by that
        for edge in self._edges:
            edge.abort()

    def settle(self) -> None:
        """After :meth:`stop`, once the connections are closed: return when nothing of the sync touches the weights."""
        for edge in self._edges:
            edge.join()
        with self._changed:
            while self._taking or self._looping:
                self._changed.wait(0.2)

    def links(self) -> set[Link]:
        """All connections that took part."""
        return self.data_links | set(self._ranks.values())

    def _state(self) -> dict[str, Any]:
        receiver = self._receiver
        agreed = all(begin["base"] == receiver.base for begin in self._begins.values())
        wants = self._sink.dtypes() if isinstance(self._sink, Targets) else {}
        return {
            **receiver.below.as_dict(),
            "base": receiver.base if agreed and self._sink.unchanged() else 0,
            "dtypes": wants,
            "speed": receiver.speed,
            "version": receiver.version,
        }

    def _set_up(self, plan: dict[str, Any]) -> None:
        bucket_bytes, below = plan.get("bucket_bytes"), plan.get("below")
        if (
            not isinstance(bucket_bytes, int)
            or not MIN_BUCKET_BYTES <= bucket_bytes <= MAX_BUCKET_BYTES
            or bucket_bytes % manifest.ALIGN
            or plan.get("mode") not in ("full", "delta")
            or not isinstance(below, list)
        ):
            raise BadFrame("a plan that makes no sense", phase="plan", peer=self._ranks[0].peer)
        self._mode = plan["mode"]
        self._manifest = Manifest(bucket_bytes)
        self._sink.begin(self._manifest)
        try:
            ends = [Below.parse(end) for end in below]
        except (ValueError, KeyError) as error:
            raise BadFrame(str(error), phase="plan", peer=self._ranks[0].peer) from error
        if isinstance(self._sink, Stream):
            self._sink.recycle = not ends
        self._edges, _ = self._receiver.outlets.edges(ends, self.sync, bucket_bytes, self._deadline, self.failed)

    def _collect(self) -> None:
        """Until the manifest is whole, every rank has ended, and every bucket is there."""
        while not (self._whole and len(self._ends) == len(self._ranks) and self._complete()):
            link, event = self._next(self._patience, "buckets", self._absent)
            self._raise_the_cause()
            if link is None:
                continue
            self._moved = time.monotonic()
            if event.kind == MANIFEST:
                self._grow(event, link)
            elif event.kind == END:
                self._end(event, link)
            else:
                raise BadFrame(f"a frame of kind {event.kind} in the middle of a sync", phase="buckets", peer=link.peer)

    def _grow(self, frame: Frame, link: Link) -> None:
        if self._whole or link is not self._ranks[0]:
            raise BadFrame(
                "a manifest after its end, or from a rank that has none to say", phase="manifest", peer=link.peer
            )
        kept = self._receiver.kept
        with self._changed:
            as_before = frame.flags and not self._manifest.entries and frame.meta == kept.meta
            if as_before and kept.manifest.bucket_bytes == self._manifest.bucket_bytes:
                self._manifest = kept.manifest
                self._sink.manifest = kept.manifest
            else:
                kept.meta = frame.meta if frame.flags and not self._manifest.entries else b""
                self._read_entries(frame, link)
            self._sink.extend()
            if frame.flags:
                if not self._manifest.entries:
                    raise SyncError(
                        "the sender has no tensor to send",
                        phase="manifest",
                        peer=link.peer,
                        fix="a sync of nothing would leave old weights in use",
                    )
                self._sink.complete()
                kept.manifest = self._manifest
                self._layout = self._still_layout()
                self._whole = True
            self._changed.notify_all()

    def _read_entries(self, frame: Frame, link: Link) -> None:
        for entry in manifest.unpack(frame.meta, link.peer):
            try:
                self._manifest.append(entry)
            except ValueError as error:
                raise SyncError(str(error), phase="manifest", peer=link.peer, tensor=entry.name) from error

    def _still_layout(self) -> pump.Layout | None:
        """Where the buckets go, if a compiled loop can put them there: straight to their tensors, and nowhere else."""
        views = self._sink.still_views() if self._mode == "full" and not self._edges and not self._busy else None
        if views is None or pump.kernel()[0] is None:
            return None
        key = (self._manifest, [buffer.data_ptr() for buffer in self._sink.buffers])
        kept = self._receiver.kept
        if kept.layout is None or kept.key != key:
            kept.key, kept.layout = key, pump.Layout(self._manifest, views, sending=False)
        kept.layout.reset()
        return kept.layout

    def _end(self, frame: Frame, link: Link) -> None:
        assert link.hello is not None
        end = frame.json()
        if link.hello.rank in self._ends:
            raise BadFrame("a rank ended twice", phase="buckets", peer=link.peer)
        self._ends[link.hello.rank] = end
        if link.hello.rank == 0:
            if not self._whole:
                raise BadFrame("the sender ended before its manifest did", phase="manifest", peer=link.peer)
            if end.get("bytes") != self._manifest.num_bytes or end.get("tensors") != len(self._manifest.entries):
                raise SyncError(
                    f"the sender sent {end.get('tensors')} tensors of {end.get('bytes')} bytes, "
                    f"{len(self._manifest.entries)} of {self._manifest.num_bytes} came",
                    phase="manifest",
                    peer=link.peer,
                )

    def _confirm(self) -> None:
        """Say to each rank the digest of what came from it, in the order of its buckets."""
        num_ranks = len(self._ranks)
        for rank, link in self._ranks.items():
            if self._layout is not None:
                checksums = self._layout.digest_bytes(rank, num_ranks)
            else:
                mine = range(rank, self._manifest.num_buckets, num_ranks)
                checksums = b"".join(self._got[bucket].to_bytes(8, "little") for bucket in mine)
            link.send(CONFIRM, self.sync, value=xxhash.xxh3_64_intdigest(checksums))

    def _expect(self, kind: int, phase: str, ranks: set[int]) -> list[Frame]:
        found: dict[int, Frame] = {}
        self._moved = time.monotonic()
        while set(found) != ranks:
            link, event = self._next(self._patience, phase, f"no {phase} came")
            self._raise_the_cause()
            if link is None:
                continue
            assert link.hello is not None
            if event.kind != kind or event.sync != self.sync or link.hello.rank not in ranks:
                raise BadFrame(f"a frame of kind {event.kind} instead of the {phase}", phase=phase, peer=link.peer)
            found[link.hello.rank] = event
        return [found[rank] for rank in sorted(ranks)]

    def _patience(self) -> float:
        """When to give up if nothing moves; a bucket that is being read has the limits of its connection."""
        with self._changed:
            if self._taking:
                self._moved = time.monotonic()
            return min(self._deadline, self._moved + self._receiver.timeout_s)

    def _absent(self) -> str:
        """What a sync that does not go on waits for."""
        with self._changed:
            there = set(self._got if self._layout is None else self._layout.known())
            absent = [index for index in range(self._manifest.num_buckets) if index not in there]
            pieces = self._manifest.pieces(absent[0]) if absent else ()
            names = ", ".join([self._manifest.entries[piece.tensor].name for piece in pieces][:3])
            if not self._whole:
                return f"the list of tensors did not end (there are {len(self._manifest.entries)}), and no more came"
            if absent:
                of = self._manifest.num_buckets
                return f"{len(absent)} of {of} buckets, the first number {absent[0]} with {names}, did not come"
            return f"no end came from rank {sorted(set(self._ranks) - set(self._ends))}"

    def _next(self, limit: Callable[[], float], phase: str, what: str | Callable[[], str]) -> tuple[Link | None, Frame]:
        """The next frame that concerns this sync; None and no frame: somebody asks to look around."""
        while True:
            left = limit() - time.monotonic()
            if left <= 0:
                peers = ", ".join(sorted({link.peer for link in self._ranks.values()}))
                raise SyncError(f"{what() if callable(what) else what} in time", phase=phase, peer=peers)
            try:
                link, event = self._receiver.events.get(timeout=min(left, 3600.0))
            except queue.Empty:
                continue
            if link is None or self._concerns(link, event, phase):
                return link, event

    def _concerns(self, link: Link, event: Any, phase: str) -> bool:
        """Whether a control connection's event is a frame to act on; an error of one of the senders is raised."""
        mine = any(link is other for other in self._ranks.values())
        if isinstance(event, BaseException):
            if mine:
                problem = event.problem if isinstance(event, SyncError) else f"{type(event).__name__}: {event}"
                raise SyncError(problem, phase=phase, peer=link.peer) from event
            return False
        if not mine:
            if link.closed:
                return False
            if event.kind == BEGIN and self.sync >= 0:
                self.later.append((link, event))
                sessions = {other.hello.session for other in self._ranks.values() if other.hello}
                if link.hello is not None and link.hello.session in sessions:
                    raise SyncError("the sender has given this sync up and begins another", phase=phase, peer=link.peer)
                return False
            return self.sync < 0 and event.kind == BEGIN  # all else is of a sync that is over
        if event.kind == BUSY:
            self._moved = time.monotonic()
            return False
        if event.kind == ERROR:
            raise event.as_error(link.peer, phase)
        return True

    def _look(self) -> None:
        """While the consumer takes the weights in: raise if there is a reason to, and tell the senders to wait."""
        self._raise_the_cause()
        now = time.monotonic()
        if now > self._deadline:
            raise SyncError(
                "the consumer did not take the weights in time", phase="consume", peer=self._receiver.address
            )
        while not self._receiver.events.empty():
            link, event = self._receiver.events.get()
            if link is not None and self._concerns(link, event, "consume"):
                raise BadFrame(f"a frame of kind {event.kind} before the end", phase="consume", peer=link.peer)
        if now - self._told > min(self._receiver.timeout_s / 4, 1.0):
            self._told = now
            for link in self._ranks.values():
                link.send(BUSY, self.sync)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _raise_the_cause(self) -> None:
        """As :meth:`_raise_if_failed`, by the main thread: a sender that broke a connection may be saying why."""
        limit = time.monotonic() + 0.1
        while isinstance(self._error, SyncError) and self._error.phase == "wait":
            try:
                link, event = self._receiver.events.get(timeout=max(limit - time.monotonic(), 0))
            except queue.Empty:
                break
            if link is not None and isinstance(event, Frame):
                self._concerns(link, event, "buckets")
        self._raise_if_failed()

    # --- the data connections' threads ---

    def take(self, link: Link, frame: Frame, ring: Ring | None) -> None:
        """Read one bucket's bytes, verify them, and pass them on.

        Raises:
            SyncError: they are not what the manifest and the checksum say.
        """
        link.deadline = self._deadline
        if frame.flags & IN_RING:
            link.transport = "shm"
        self.data_links.add(link)
        self._wait_for_layout(frame.index, link)
        try:
            self._take(link, frame, ring)
        finally:
            with self._changed:
                self._taking -= 1
                self._moved = time.monotonic()
                self._changed.notify_all()

    def _take(self, link: Link, frame: Frame, ring: Ring | None) -> None:
        begin = time.perf_counter()
        slot, source, size = self._source(frame, ring, link)
        take = self._take_delta if frame.flags & DELTA else self._take_full
        try:
            bucket, waited = take(link, frame, source, size)
        finally:
            if source is not None:
                source.release()  # the error's traceback would keep the ring's memory
        if slot >= 0:
            link.send(RELEASE, self.sync, index=slot)
        with self._changed:
            self._wire_bytes += size if self._layout is None else 0
            self._stages["receive"] += waited - begin
            self._stages["unpack"] += time.perf_counter() - waited
        for edge in self._edges:
            edge.offer(bucket)
        self._sink.done(frame.index)
        with self._changed:
            if self._layout is None:
                self._got[frame.index] = frame.checksum
            else:
                self._layout.mark(frame.index, frame.checksum)
            complete = self._complete()
        if complete:
            self._receiver.events.put((None, None))  # type: ignore[arg-type]

    def _complete(self) -> bool:
        """Whether every bucket of a whole manifest is there."""
        if not self._whole:
            return False
        return not self._layout.missing if self._layout else len(self._got) == self._manifest.num_buckets

    def take_many(self, link: Link, ring: Ring | None) -> Frame | None:
        """Take buckets by a compiled loop, where that can be done, until another frame or the last bucket comes."""
        layout = self._layout
        if layout is None or self._complete():
            return None
        begin = time.perf_counter()

        def moved(buckets: int) -> bool:
            nonlocal begin
            now = time.perf_counter()
            with self._changed:
                if buckets:
                    self._moved = time.monotonic()
                    self._stages["receive"] += now - begin
                begin = now
            self._raise_if_failed()
            if self._complete():
                self._receiver.events.put((None, None))  # type: ignore[arg-type]
                return False
            return True

        with self._changed:
            self._looping += 1
            self.wrote = True
        try:
            return link.receive_buckets(layout, self.sync, ring, moved)
        except pump.Damaged as error:
            self._damaged(link, error.bucket)
        finally:
            with self._changed:
                self._looping -= 1
                self._changed.notify_all()

    def _source(self, frame: Frame, ring: Ring | None, link: Link) -> tuple[int, memoryview | None, int]:
        if not frame.flags & IN_RING:
            return -1, None, frame.size
        slot, size = frame.value >> 32, frame.value & 0xFFFFFFFF
        if ring is None or slot >= ring.num_slots or size > ring.slot_bytes:
            raise BadFrame("a bucket in shared memory that is not there", phase="buckets", peer=link.peer)
        return slot, ring.slot(slot)[:size], size

    def _take_full(self, link: Link, frame: Frame, source: memoryview | None, size: int) -> tuple[Bucket, float]:
        if size != self._manifest.bucket_size(frame.index):
            expected = self._manifest.bucket_size(frame.index)
            raise BadFrame(
                f"bucket {frame.index} has {size} bytes instead of {expected}", phase="buckets", peer=link.peer
            )
        parts = self._sink.parts(frame.index, self._raise_if_failed)
        self.wrote = True
        if source is None:
            trailer = bytearray(8) if frame.flags & TRAILER else b""
            link.read_into([*parts, trailer])
            if trailer:
                frame.checksum = int.from_bytes(trailer, "little")
            there = time.perf_counter()
            found = memory.checksum(parts)
        else:
            there = time.perf_counter()
            found = memory.checksum([source])
            at = 0
            for part in parts:
                memory.copy(part, source[at : at + len(part)])
                at += len(part)
        if found != frame.checksum:
            self._damaged(link, frame.index)
        return Bucket(frame.index, parts, known=frame.checksum, keep=self._keep(frame.index)), there

    def _take_delta(self, link: Link, frame: Frame, source: memoryview | None, size: int) -> tuple[Bucket, float]:
        if self._mode != "delta" or size > self._manifest.bucket_size(frame.index):
            raise BadFrame(f"bucket {frame.index} is a delta that was not agreed", phase="buckets", peer=link.peer)
        payload = torch.empty(size, dtype=torch.uint8)
        into = memory.view(payload)
        if source is None:
            link.read_into([into])
        else:
            memory.copy(into, source)
        there = time.perf_counter()
        if memory.checksum([into]) != frame.checksum:
            self._damaged(link, frame.index)
        self.wrote = True
        self._apply(frame, payload, link)
        return Bucket(frame.index, [into], flags=DELTA, meta=frame.meta, known=frame.checksum, keep=payload), there

    def _apply(self, frame: Frame, payload: torch.Tensor, link: Link) -> None:
        pieces = list(self._manifest.pieces(frame.index))
        if len(frame.meta) != _DELTA_HEAD.size + len(pieces) * _DELTA_PIECE.size:
            raise BadFrame(f"bucket {frame.index}: a delta of other pieces", phase="buckets", peer=link.peer)
        (result,) = _DELTA_HEAD.unpack_from(frame.meta)
        records = _DELTA_PIECE.iter_unpack(frame.meta[_DELTA_HEAD.size :])
        at = changed = 0
        for piece, (encoding, size) in zip(pieces, records, strict=True):
            entry = self._manifest.entries[piece.tensor]
            target = memory.as_bytes(self._sink.buffers[piece.tensor])[piece.start : piece.start + piece.size]
            try:
                changed += delta.apply(target, payload[at : at + size], encoding, min(entry.dtype.itemsize, 8))
            except ValueError as error:
                raise BadFrame(str(error), phase="buckets", peer=link.peer, tensor=entry.name) from error
            at += size
        if at != len(payload):
            raise BadFrame(f"bucket {frame.index}: a delta with bytes left over", phase="buckets", peer=link.peer)
        if memory.checksum(self._sink.parts(frame.index, self._raise_if_failed)) != result:
            raise SyncError(
                f"bucket {frame.index} differs from the sender's after its delta: the weights here were not its base",
                phase="buckets",
                peer=link.peer,
                tensor=self._manifest.entries[pieces[0].tensor].name,
                fix="the next sync sends all again; does anything else write to the receiver's tensors?",
            )
        with self._changed:
            self._changes += changed

    def _wait_for_layout(self, index: int, link: Link) -> None:
        """Until the manifest covers the bucket; each is taken once."""
        with self._changed:
            while not self._whole and self._manifest.num_bytes < (index + 1) * self._manifest.bucket_bytes:
                self._raise_if_failed()
                if time.monotonic() > self._deadline:
                    raise SyncError("a bucket came and its manifest did not", phase="manifest", peer=link.peer)
                self._changed.wait(0.2)
            self._raise_if_failed()
            twice = index in self._busy or (self._layout is not None and self._layout.is_known(index))
            if index >= self._manifest.num_buckets or twice:
                what = "came twice" if twice else f"of {self._manifest.num_buckets}"
                raise BadFrame(f"bucket {index} {what}", phase="buckets", peer=link.peer)
            self._busy.add(index)
            self._taking += 1

    def _keep(self, index: int) -> list[torch.Tensor]:
        return [self._sink.buffers[piece.tensor] for piece in self._manifest.pieces(index)] if self._edges else []

    def _damaged(self, link: Link, index: int) -> NoReturn:
        names = [self._manifest.entries[piece.tensor].name for piece in self._manifest.pieces(index)]
        raise SyncError(
            f"bucket {index} arrived damaged: its checksum differs",
            phase="buckets",
            peer=link.peer,
            tensor=", ".join(names[:3]) + (", ..." if len(names) > 3 else ""),
            fix="the link or the memory of one end is faulty; the next sync sends all again",
        )


def _checked(begin: dict[str, Any], link: Link) -> dict[str, Any]:
    """A BEGIN frame's fields, each of its type.

    Raises:
        BadFrame: they are not.
    """
    for name, kind in (("ranks", int), ("version", int), ("base", int), ("sync", int)):
        if not isinstance(begin.get(name), kind) or isinstance(begin[name], bool):
            raise BadFrame(f"a beginning without its {name}", phase="begin", peer=link.peer)
    if (
        not isinstance(begin.get("about", {}), dict)
        or not 0 < begin["ranks"] <= MAX_RANKS
        or not 0 <= begin["sync"] < 1 << 63
    ):
        raise BadFrame("a beginning that makes no sense", phase="begin", peer=link.peer)
    return begin
