"""The sending end: one rank of a trainer. It talks to every receiver, and sends bytes only where they must go."""

from __future__ import annotations

import functools
import logging
import math
import queue
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash

from verl_fl._errors import explain
from verl_fl.weight_sync import delta as codec
from verl_fl.weight_sync import manifest, memory, plan
from verl_fl.weight_sync._errors import BadFrame, SyncError
from verl_fl.weight_sync._secret import job_secret
from verl_fl.weight_sync.edge import Bucket, Edge, Run
from verl_fl.weight_sync.incoming import MAX_BUCKET_BYTES, MIN_BUCKET_BYTES
from verl_fl.weight_sync.link import (
    BEGIN,
    BUSY,
    COMMIT,
    CONFIRM,
    CONTROL,
    DELTA,
    DONE,
    END,
    ERROR,
    MANIFEST,
    PLAN,
    READY,
    STATE,
    Frame,
    Hello,
    Link,
    dial,
    host_id,
    parse_address,
)
from verl_fl.weight_sync.outlets import TRANSPORTS, Below, Outlets
from verl_fl.weight_sync.report import Report
from verl_fl.weight_sync.source import Source, Weights
from verl_fl.weight_sync.staging import Staging

logger = logging.getLogger("verl_fl.weight_sync")

BUCKET_BYTES, DELTA_BUCKET_BYTES = 1 << 20, 4 << 20
"""Small enough to overlap the stages; of a delta little is left to overlap, and each bucket has its price."""

_ENTRIES_A_FRAME = 8192
_DELTA_HEAD, _DELTA_PIECE = struct.Struct("<Q"), struct.Struct("<BI")


class Sender:
    """Sends weights to receivers, each byte over each host's link once.

    Args:
        addresses: of the receivers, ``tcp://host:port``; may be set anew between syncs.
        secret: of the job; None: the environment's ``VERL_FL_SECRET``.
        rank: of this sender among ``num_ranks``; every rank calls :meth:`send` with the same names in the same order,
            and sends its share of the bytes.
        transport: ``auto``, ``tcp``, ``unix`` or ``shm`` for all edges, or a mapping from an address to one of them.
        topology: ``auto``, ``chain``, ``tree`` or ``star``: who passes weights on to whom.
        lanes: sockets of each tcp or unix edge.
        bucket_bytes: of each bucket, a multiple of 64; None: 1 MiB, with deltas 4 MiB.
        delta: send only what changed to receivers that hold the last sync's weights. Costs a copy of this rank's share
            of the model in host memory.
        timeout_s: limit of every wait for a peer without progress.
        sync_limit_s: limit of a whole sync.

    Raises:
        ValueError: an argument is none of its legal values.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        secret: bytes | str | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        transport: str | dict[str, str] = "auto",
        topology: str = "auto",
        lanes: int = 2,
        bucket_bytes: int | None = None,
        delta: bool = False,
        timeout_s: float = 60.0,
        sync_limit_s: float = 1800.0,
    ) -> None:
        if bucket_bytes is None:
            bucket_bytes = DELTA_BUCKET_BYTES if delta else BUCKET_BYTES
        _check(rank, num_ranks, transport, topology, lanes, bucket_bytes)
        self._secret = job_secret(secret)
        self.rank, self.num_ranks = rank, num_ranks
        self.transport, self.topology, self.bucket_bytes, self.delta = transport, topology, bucket_bytes, delta
        self.timeout_s, self.sync_limit_s = timeout_s, sync_limit_s
        self.session = secrets.token_bytes(16)
        self._outlets = Outlets(self.session, rank, self._secret, lanes=lanes, timeout_s=timeout_s)
        self._links: dict[str, Link] = {}
        self._threads: list[threading.Thread] = []
        self._events: queue.Queue[tuple[Link, Any]] = queue.Queue()
        self._staging: dict[tuple, Staging] = {}
        self._run: dict[str, Any] = {}
        self._copy: dict[int, torch.Tensor] = {}
        self._layouts: dict[int, tuple] = {}
        """What lies in each bucket of the copy."""
        self._base = self._last_bytes = 0
        self._busy = threading.Lock()
        self.addresses = addresses

    @property
    def addresses(self) -> list[str]:
        """The receivers; those that stay keep their connections."""
        return self._addresses

    @addresses.setter
    def addresses(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            parse_address(address)
        if len(set(addresses)) != len(addresses):
            raise ValueError(explain("a receiver is named twice", asked=", ".join(addresses)))
        self._addresses = list(addresses)

    def send(self, weights: Weights, version: int = 0, about: dict[str, Any] | None = None) -> Report:
        """Send a model to all receivers; returns when each of them has confirmed every byte.

        Args:
            weights: a mapping of names to tensors, which must not change meanwhile, or an iterable of pairs. What lies
                in plain host memory is sent from where it is.
            version: of the model, 0 or more; receivers report it.
            about: what else receivers are to know of these weights, as JSON can say it; see :attr:`Receiver.about`.

        Raises:
            SyncError: a receiver failed or can't be reached; all receivers were told, and the next sync may be tried.
            ValueError: the weights are no such pairs, or a name comes twice.
        """
        if not self._addresses:
            raise ValueError(explain("there is no receiver to send to", fix="set `addresses`"))
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this sender is in a sync already; send() does one at a time")
        sync = _Outgoing(self, version, about or {})
        try:
            return sync.run(weights)
        except BaseException as error:
            sync.stop(error)
            self.close()
            sync.settle()
            raise
        finally:
            self._busy.release()

    def close(self) -> None:
        """Close all connections; the next :meth:`send` opens them again. Idempotent."""
        self._outlets.close()
        for link in self._links.values():
            link.close()
        for thread in self._threads:
            thread.join(5.0)
        self._links, self._threads, self._base = {}, [], 0
        self._copy, self._layouts = {}, {}
        self._staging = {}  # buffers of a sync that failed may never be given back

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self) -> dict[str, Link]:
        """Control connections to all receivers, those that are still open kept."""
        while not self._events.empty():  # of an earlier sync, or the end of a connection: that receiver started anew
            link, event = self._events.get()
            if isinstance(event, BaseException):
                link.close()
        for address in [a for a, link in self._links.items() if a not in self._addresses or link.closed]:
            self._links.pop(address).close()
        new = [address for address in self._addresses if address not in self._links]
        if new:
            hello = Hello(CONTROL, self.session, self.rank)
            with ThreadPoolExecutor(min(len(new), 16), "verl-fl-dial") as pool:
                dialed = list(
                    pool.map(lambda a: _attempt(lambda: dial(a, hello, self._secret, self.timeout_s)[0]), new)
                )
            for address, link in zip(new, dialed, strict=True):
                if isinstance(link, Link):
                    self._links[address] = link
                    thread = threading.Thread(target=self._listen, args=(link,), name="verl-fl-control", daemon=True)
                    thread.start()
                    self._threads.append(thread)
            for link in dialed:
                if isinstance(link, BaseException):
                    raise link
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return {address: self._links[address] for address in self._addresses}

    def _listen(self, link: Link) -> None:
        try:
            while True:
                self._events.put((link, link.receive(idle_s=None)))
        except BaseException as error:
            self._events.put((link, error))


class _Outgoing:
    """The state of one sync."""

    def __init__(self, sender: Sender, version: int, about: dict[str, Any]) -> None:
        self._sender, self._version, self._about = sender, version, about
        self._sync = secrets.randbits(62) + 1
        self._begin = time.perf_counter()
        self._deadline = time.monotonic() + sender.sync_limit_s
        self._links: dict[str, Link] = {}
        self._edges: list[Edge] = []
        self._error: BaseException | None = None
        self._modes: dict[str, str] = {}
        self._transports: dict[str, str] = {}
        self._changed = 0

    def run(self, weights: Weights) -> Report:
        """From the first word to the last."""
        sender = self._sender
        self._links = sender._connect()
        for link in self._links.values():
            link.deadline = self._deadline
        body: dict[str, Any] = {
            "ranks": sender.num_ranks,
            "version": self._version,
            "base": sender._base,
            "sync": self._sync,
        }
        body["about"] = self._about
        self._tell(BEGIN, body)
        states = self._agree() if sender.rank == 0 else self._follow()
        source = Source(
            sender.bucket_bytes,
            rank=sender.rank,
            num_ranks=sender.num_ranks,
            dtype_of=_wanted(states),
            staging=sender._staging,
            grown=self._grown,
            wait=self._look,
            run=None if sender.delta else sender._run,
        )
        sent: list[Bucket] = []
        run: Run | None = None
        for bucket in source.buckets(weights):
            if isinstance(bucket, Run):
                run = bucket
                for edge in self._edges:
                    edge.offer_run(bucket)
                break
            self._prepare(bucket, source)
            for edge in self._edges:
                edge.offer(bucket)
            sent.append(bucket)
            bucket.drop()
            self._look()
        for edge in self._edges:
            edge.finish(self._look)
        self._look()
        return self._finish(source, run or sent)

    def stop(self, error: BaseException) -> None:
        """Tell every receiver why there will be no more."""
        for edge in self._edges:
            edge.abort()
        said = error.problem if isinstance(error, SyncError) else f"{type(error).__name__}: {error}"
        for link in self._links.values():
            try:
                link.deadline = time.monotonic() + 1
                link.send(
                    ERROR,
                    self._sync,
                    {
                        "error": said[:4000],
                        "phase": getattr(error, "phase", "send"),
                        "tensor": getattr(error, "tensor", ""),
                    },
                )
            except (SyncError, OSError):
                pass  # it is gone, and learns of the failure by that

    def settle(self) -> None:
        """After :meth:`stop`, once the connections are closed: return when nothing reads the weights any more."""
        for edge in self._edges:
            edge.join()

    # --- the plan ---

    def _agree(self) -> list[dict[str, Any]]:
        """Ask every receiver what it holds, decide who gets what from whom, and tell."""
        sender = self._sender
        states = {a: _checked_state(f.json(), a) for a, f in self._expect(STATE, "begin").items()}
        modes = {
            a: "delta" if sender.delta and sender._base and s["base"] == sender._base else "full"
            for a, s in states.items()
        }
        seen = [plan.Seen(self._below(a, s), modes[a], s["speed"]) for a, s in states.items()]
        above = plan.parents(
            seen, host_id(), topology=sender.topology, num_bytes=sender._last_bytes, bucket_bytes=sender.bucket_bytes
        )
        ends = {s.below.address: s.below for s in seen}
        wants = [state["dtypes"] for state in states.values()]
        for address, link in self._links.items():
            link.send(
                PLAN,
                self._sync,
                {
                    "bucket_bytes": sender.bucket_bytes,
                    "mode": modes[address],
                    "root": above[address] is None,
                    "below": [ends[a].as_dict() for a, parent in above.items() if parent == address],
                    "wants": wants,
                },
            )
        self._modes = modes
        self._expect(READY, "plan")
        self._open([ends[a] for a, parent in above.items() if parent is None])
        return wants

    def _follow(self) -> list[dict[str, Any]]:
        """Ranks other than 0 learn from the receivers what rank 0 has decided."""
        frames = self._expect(PLAN, "plan")
        plans = {address: _checked_plan(frame.json(), address) for address, frame in frames.items()}
        if len({frame.sync for frame in frames.values()}) > 1:
            raise SyncError("the receivers are in different syncs", phase="plan", peer=", ".join(frames))
        self._sync = next(iter(frames.values())).sync  # rank 0 numbers the syncs
        self._modes = {address: found["mode"] for address, found in plans.items()}
        first = next(iter(plans.values()))
        if first["bucket_bytes"] != self._sender.bucket_bytes:
            raise SyncError(
                f"rank 0 cuts buckets of {first['bucket_bytes']} bytes, this rank of {self._sender.bucket_bytes}",
                phase="plan",
            )
        self._open([self._below(a, found["me"]) for a, found in plans.items() if found["root"]])
        return first["wants"]

    def _below(self, address: str, state: dict[str, Any]) -> Below:
        chosen = self._sender.transport
        chosen = chosen if isinstance(chosen, str) else chosen.get(address, "auto")
        return Below(address, str(state["host"]), str(state["unix"]), chosen)

    def _open(self, roots: list[Below]) -> None:
        self._edges, self._transports = self._sender._outlets.edges(
            roots, self._sync, self._sender.bucket_bytes, self._deadline, self._failed, self._modes
        )

    # --- the bytes ---

    def _grown(self, found: manifest.Manifest, first: int, whole: bool) -> None:
        if self._sender.rank:
            return
        if whole and first == 0 and len(found.entries) <= _ENTRIES_A_FRAME:
            return self._tell(MANIFEST, found.packed(), flags=1)
        for low in range(first, max(len(found.entries), first + 1), _ENTRIES_A_FRAME):
            last = whole and low + _ENTRIES_A_FRAME >= len(found.entries)
            self._tell(MANIFEST, manifest.pack(found.entries[low : low + _ENTRIES_A_FRAME]), flags=int(last))

    def _prepare(self, bucket: Bucket, source: Source) -> None:
        if not self._sender.delta:
            return
        entries = source.manifest.entries
        layout = tuple(
            (e.name, e.dtype, e.shape, p.start, p.offset)
            for p in source.manifest.pieces(bucket.index)
            for e in [entries[p.tensor]]
        )
        known = self._sender._layouts.get(bucket.index) == layout
        self._sender._layouts[bucket.index] = layout
        if self._sender._base and any(edge.delta for edge in self._edges):
            if not known:  # the model has changed: this bucket goes whole, also to those that get deltas
                bucket.prepare = functools.partial(self._remember, bucket)
                return
            bucket.delta = Bucket(bucket.index, [], flags=DELTA)
            bucket.prepare = functools.partial(self._encode, bucket)
        else:
            self._sender._base = 0
            bucket.prepare = functools.partial(self._remember, bucket)

    def _remember(self, bucket: Bucket) -> None:
        kept = self._sender._copy.get(bucket.index)
        if kept is None or kept.numel() != bucket.size:
            kept = self._sender._copy[bucket.index] = torch.empty(bucket.size, dtype=torch.uint8)
        into, at = memory.view(kept), 0
        for part in bucket.parts:
            memory.copy(into[at : at + len(part)], part)
            at += len(part)

    def _encode(self, bucket: Bucket) -> None:
        """Make the bucket's delta from the copy of what was confirmed, and the copy what the bucket is."""
        assert bucket.delta is not None
        old, used = self._sender._copy[bucket.index], 0
        out = torch.empty(codec.bound(bucket.size) + 8 * len(bucket.pieces), dtype=torch.uint8)
        records = []
        for piece, itemsize, offset in bucket.pieces:
            encoding, size, changed = codec.encode(piece, old[offset : offset + piece.numel()], itemsize, out[used:])
            records.append(_DELTA_PIECE.pack(encoding, size))
            used += size
            self._changed += changed
        bucket.delta.parts, bucket.delta.size, bucket.delta.keep = [memory.view(out)[:used]], used, out
        bucket.delta.meta = _DELTA_HEAD.pack(memory.checksum(bucket.parts)) + b"".join(records)

    # --- the end ---

    def _finish(self, source: Source, sent: list[Bucket] | Run) -> Report:
        sender = self._sender
        found = source.manifest
        self._tell(END, {"tensors": len(found.entries), "bytes": found.num_bytes})
        digests = {mode: self._digest(sent, delta=mode == "delta") for mode in set(self._modes.values())}
        for address, frame in self._expect(CONFIRM, "confirm").items():
            if frame.value != digests[self._modes[address]]:
                raise SyncError("it confirmed other bytes than were sent", phase="confirm", peer=address)
        self._tell(COMMIT)
        self._expect(DONE, "commit")
        for link in self._links.values():
            link.deadline = float("inf")
        for index in [index for index in sender._copy if index >= found.num_buckets]:
            del sender._copy[index], sender._layouts[index]
        sender._base = self._sync if sender.delta else 0
        sender._last_bytes = found.num_bytes
        modes = set(self._modes.values())
        elements = sum(e.num_bytes // e.dtype.itemsize for e in found.entries if e.alias_of < 0) / sender.num_ranks
        report = Report(
            version=self._version,
            mode=modes.pop() if len(modes) == 1 else "mixed",
            num_tensors=len(found.entries),
            num_bytes=found.num_bytes,
            wire_bytes=sum(edge.sent_bytes for edge in self._edges),
            seconds=time.perf_counter() - self._begin,
            changed=self._changed / max(elements, 1) if "delta" in self._modes.values() else 1.0,
            edges=dict(self._transports),
            overflowed=dict(source.overflowed),
            stages=source.seconds | {"send": sum(edge.busy_s for edge in self._edges)},
        )
        if report.overflowed:
            logger.warning(
                "weight sync: the cast to the receiver's dtype made finite values infinite: %s", report.overflowed
            )
        return report

    def _digest(self, sent: list[Bucket] | Run, *, delta: bool) -> int:
        """Of the checksums of this rank's buckets in order."""
        if isinstance(sent, Run):
            return xxhash.xxh3_64_intdigest(sent.layout.digest_bytes(self._sender.rank, self._sender.num_ranks))
        checksums = [bucket.ready(delta=delta).checksum() for bucket in sent]
        return xxhash.xxh3_64_intdigest(b"".join(checksum.to_bytes(8, "little") for checksum in checksums))

    # --- frames ---

    def _tell(self, kind: int, body: dict[str, Any] | bytes = b"", **fields: int) -> None:
        for link in self._links.values():
            link.send(kind, self._sync, body, **fields)

    def _expect(self, kind: int, phase: str) -> dict[str, Frame]:
        """One frame of this kind from every receiver."""
        found: dict[str, Frame] = {}
        by_link = {link: address for address, link in self._links.items()}
        limit = min(self._deadline, time.monotonic() + self._sender.timeout_s)
        while len(found) < len(self._links):
            left = limit - time.monotonic()
            if left <= 0:
                silent = ", ".join(sorted(set(self._links) - set(found)))
                raise SyncError(f"no answer in {self._sender.timeout_s:g} s", phase=phase, peer=silent)
            try:
                link, event = self._sender._events.get(timeout=left)
            except queue.Empty:
                continue
            if kind == DONE and by_link.get(link) in found:
                continue  # it has the weights, and may go
            self._raise(link, event, phase)
            if link not in by_link:
                continue
            if event.sync not in (self._sync, 0) and kind != PLAN:  # ranks but 0 learn the number from the plan
                continue
            if event.kind == BUSY:  # its consumer is at work; the others wait for it as we do
                limit = min(self._deadline, time.monotonic() + self._sender.timeout_s)
                self._tell(BUSY)
                continue
            if event.kind != kind:
                raise BadFrame(f"a frame of kind {event.kind} came instead of {kind}", phase=phase, peer=link.peer)
            found[by_link[link]] = event
        return found

    def _look(self) -> None:
        """Raise if a receiver has given up or a thread has failed; waits for nothing."""
        while not self._sender._events.empty():
            link, event = self._sender._events.get()
            self._raise(link, event, "buckets")
        if time.monotonic() > self._deadline:
            raise SyncError(f"the sync took longer than its limit of {self._sender.sync_limit_s:g} s", phase="buckets")
        if self._error is not None:
            # The peer that broke the connection may have said why on the other one.
            time.sleep(0.05)
            while not self._sender._events.empty():
                self._raise(*self._sender._events.get(), "buckets", only_said=True)
            raise self._error

    def _raise(self, link: Link, event: Any, phase: str, *, only_said: bool = False) -> None:
        if link not in self._links.values():
            return
        if isinstance(event, Frame) and event.kind == ERROR:
            raise event.as_error(link.peer, phase)
        if isinstance(event, BaseException) and not only_said:
            problem = event.problem if isinstance(event, SyncError) else str(event)
            raise SyncError(problem, phase=phase, peer=link.peer) from event

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, Exception) and not isinstance(error, SyncError):
            cause = error
            error = SyncError(f"{type(cause).__name__}: {cause}", phase="buckets")
            error.__cause__ = cause
        if self._error is None:
            self._error = error
        for edge in self._edges:
            edge.abort()


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def _wanted(states: Sequence[dict[str, str]]) -> Callable[[str], torch.dtype | None]:
    """What a tensor is cast to: what all receivers want it to be; None where they differ, or want nothing."""
    common = {name for state in states for name in state} | {""}
    found: dict[str, torch.dtype | None] = {}
    for name in common:
        wants = {state.get(name, state.get("")) for state in states}
        dtype = getattr(torch, wants.pop() or "", None) if len(wants) == 1 else None
        found[name] = dtype if isinstance(dtype, torch.dtype) else None
    return lambda name: found.get(name, found[""])


def _checked_state(state: dict[str, Any], peer: str) -> dict[str, Any]:
    kinds = {"base": int, "speed": (int, float), "dtypes": dict, "host": str, "unix": str}
    good = all(isinstance(state.get(name), kind) for name, kind in kinds.items())  # type: ignore[arg-type]
    if not good or not _are_dtypes(state["dtypes"]) or not math.isfinite(state["speed"]):
        raise BadFrame("a state that makes no sense", phase="begin", peer=peer)
    return state


def _checked_plan(found: dict[str, Any], peer: str) -> dict[str, Any]:
    kinds = {"bucket_bytes": int, "root": bool, "wants": list, "me": dict}
    good = all(isinstance(found.get(name), kind) for name, kind in kinds.items())
    good = good and all(isinstance(found["me"].get(name), str) for name in ("host", "unix"))
    if not good or found.get("mode") not in ("full", "delta") or not all(map(_are_dtypes, found["wants"])):
        raise BadFrame("a plan that makes no sense", phase="plan", peer=peer)
    return found


def _are_dtypes(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(dtype, str) for dtype in value.values())


def _check(rank: int, num_ranks: int, transport: Any, topology: str, lanes: int, bucket_bytes: int) -> None:
    if not 0 <= rank < num_ranks:
        raise ValueError(explain("no such rank", asked=f"rank {rank} of {num_ranks}", legal="0 <= rank < num_ranks"))
    for value in [transport] if isinstance(transport, str) else transport.values():
        if value not in TRANSPORTS:
            raise ValueError(explain("no such transport", asked=repr(value), legal=", ".join(TRANSPORTS)))
    if topology not in plan.TOPOLOGIES:
        raise ValueError(explain("no such topology", asked=repr(topology), legal=", ".join(plan.TOPOLOGIES)))
    if not 1 <= lanes <= 64:
        raise ValueError(explain("no such number of lanes", asked=lanes, legal="1 to 64", fix="2 suits most links"))
    if not MIN_BUCKET_BYTES <= bucket_bytes <= MAX_BUCKET_BYTES or bucket_bytes % manifest.ALIGN:
        raise ValueError(
            explain(
                "no such size of a bucket",
                asked=f"bucket_bytes={bucket_bytes}",
                legal=f"a multiple of {manifest.ALIGN} from {MIN_BUCKET_BYTES} to {MAX_BUCKET_BYTES}",
                fix=f"{BUCKET_BYTES} suits most machines",
            )
        )
