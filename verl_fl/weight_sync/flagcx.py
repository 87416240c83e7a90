"""FlagCX's C API, as far as weights need it: bytes from device to device between ranks of any vendors.

Signatures and layouts are those of its ``flagcx.h`` up to 0.13, whose calls differ from those before
(:attr:`verl_fl.platform.flagcx.FlagCX.api`). A call may block for as long as a peer is late, and none of them takes a
time limit: a caller that must not hang makes them in a thread that it can leave, with the device set in that thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

from verl_fl import _env
from verl_fl._errors import explain
from verl_fl.platform import flagcx

UNIQUE_ID_BYTES = 256

_UINT8 = 1  # flagcxUint8, which every adaptor of FlagCX knows
_NOT_SUPPORTED = 9
_RESULTS = (
    "flagcxSuccess",
    "flagcxUnhandledDeviceError",
    "flagcxSystemError",
    "flagcxInternalError",
    "flagcxInvalidArgument",
    "flagcxInvalidUsage",
    "flagcxRemoteError",
    "flagcxInProgress",
    "flagcxUnhandledCCLError",
    "flagcxNotSupported",
)

_CALLS: dict[str, list[Any]] = {
    "flagcxGetVersion": [POINTER(c_int)],
    "flagcxGetUniqueId": [c_void_p],  # up to 0.12 where to put a pointer, since 0.13 where to put the 256 bytes
    "flagcxCommInitRank": [POINTER(c_void_p), c_int, c_void_p, c_int],
    "flagcxCommDestroy": [c_void_p],
    "flagcxCommAbort": [c_void_p],
    "flagcxGroupStart": [c_void_p],
    "flagcxGroupEnd": [c_void_p],
    "flagcxSend": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "flagcxRecv": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "flagcxBroadcast": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
}
_TEXTS: dict[str, list[Any]] = {"flagcxGetErrorString": [c_int], "flagcxGetLastError": [c_void_p]}
_HANDLES: dict[str, list[Any]] = {"flagcxDeviceHandleInit": [c_void_p], "flagcxHandleInit": [c_void_p]}
_SINCE = "flagcxMemAlloc"  # as old as the slot hostGetDevicePointer, without which all later slots lie one further up


class _DeviceHandle(ctypes.Structure):
    """``struct flagcxDeviceHandle`` up to the last function that is called here."""

    _fields_ = [
        ("deviceSynchronize", c_void_p),
        ("deviceMemcpy", c_void_p),
        ("deviceMemset", c_void_p),
        ("deviceMalloc", c_void_p),
        ("deviceFree", c_void_p),
        ("setDevice", c_void_p),
        ("getDevice", c_void_p),
        ("getDeviceCount", c_void_p),
        ("getVendor", c_void_p),
        ("hostGetDevicePointer", c_void_p),
        ("streamCreate", CFUNCTYPE(c_int, POINTER(c_void_p))),
        ("streamDestroy", CFUNCTYPE(c_int, c_void_p)),
        ("streamCopy", c_void_p),
        ("streamFree", c_void_p),
        ("streamSynchronize", CFUNCTYPE(c_int, c_void_p)),
    ]


class _HandlerGroup(ctypes.Structure):
    """``struct flagcxHandlerGroup``."""

    _fields_ = [("uniqueId", c_void_p), ("comm", c_void_p), ("devHandle", POINTER(_DeviceHandle))]


def load(path: str | None = None) -> Library:
    """Open ``libflagcx.so``: the one at ``path``, or the one that detection finds. Once a process and path.

    Raises:
        RuntimeError: it isn't there, does not load, or is no FlagCX that is known here; says which.
    """
    if path is None:
        found = flagcx.find()
        if not found.found:
            raise RuntimeError(_unusable("FlagCX is not here", "the library libflagcx.so", found.reason))
        path = found.library
    return _opened(path)


@functools.cache
def _opened(path: str) -> Library:
    problem = f"{path} can't be used as FlagCX"
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise RuntimeError(_unusable(problem, "to load it", str(error))) from error
    missing = [name for name in (*_CALLS, *_TEXTS, _SINCE) if not hasattr(library, name)]
    if not any(hasattr(library, name) for name in _HANDLES):
        missing.append(" or ".join(_HANDLES))
    if missing:
        raise RuntimeError(_unusable(problem, "the functions that weights need", f"no {', '.join(missing)}"))
    return Library(path, library)


def _unusable(problem: str, asked: str, found: str) -> str:
    return explain(
        problem,
        asked=asked,
        found=found,
        legal=f"FlagCX 0.13, or one before it that exports {_SINCE}",
        fix=f"build FlagCX for this chip and set {_env.FLAGCX_PATH} to it, or send weights another way",
    )


class Library:
    """An open ``libflagcx.so``, made by :func:`load`; its methods may be called from any thread."""

    def __init__(self, path: str, library: ctypes.CDLL) -> None:
        self.path = path
        self.api = "devHandle" if hasattr(library, "flagcxDeviceHandleInit") else "handle"
        """``devHandle`` since FlagCX 0.13, ``handle`` before."""
        self._library = library
        for name, types in (_CALLS | _TEXTS | _HANDLES).items():
            if hasattr(library, name):
                getattr(library, name).argtypes = types
                getattr(library, name).restype = c_char_p if name in _TEXTS else c_int
        self._device = self._device_handle()
        self._wrapped: dict[int, Stream] = {}

    def _device_handle(self) -> _DeviceHandle:
        # Never freed: it lives as long as the process.
        if self.api == "devHandle":
            device = POINTER(_DeviceHandle)()
            self.call("flagcxDeviceHandleInit", byref(device), doing="the functions of this process's device")
            return device.contents
        group = POINTER(_HandlerGroup)()
        self.call("flagcxHandleInit", byref(group), doing="the functions of this process's device")
        return group.contents.devHandle.contents

    def version(self) -> str:
        """What the library says of itself. FlagCX up to 0.13 always says 1.0.0: trust :attr:`api` more."""
        number = c_int()
        self.call("flagcxGetVersion", byref(number), doing="the library's version")
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def unique_id(self) -> bytes:
        """Make the id of one new communicator: on one rank, which gives it to all others and stays alive meanwhile."""
        doing = "the id of a new communicator"
        if self.api == "devHandle":
            made = ctypes.create_string_buffer(UNIQUE_ID_BYTES)
            self.call("flagcxGetUniqueId", byref(made), doing=doing)
            return made.raw
        pointer = c_void_p()  # FlagCX allocates these 256 bytes and leaves them to the process
        self.call("flagcxGetUniqueId", byref(pointer), doing=doing)
        assert pointer.value is not None
        return ctypes.string_at(pointer.value, UNIQUE_ID_BYTES)

    def communicator(self, unique_id: bytes, world_size: int, rank: int) -> Communicator:
        """Join the communicator of ``unique_id`` with this thread's current device; blocks until all ranks have.

        Raises:
            ValueError: the id has not 256 bytes, or there is no such rank.
            RuntimeError: FlagCX refuses.
        """
        if len(unique_id) != UNIQUE_ID_BYTES or not 0 <= rank < world_size:
            raise ValueError(
                explain(
                    "there is no such communicator",
                    asked=f"rank {rank} of {world_size} with an id of {len(unique_id)} bytes",
                    legal=f"rank 0 to world size - 1, an id of {UNIQUE_ID_BYTES} bytes",
                    fix="give every rank what Library.unique_id returned on one of them",
                )
            )
        handle = c_void_p()
        theirs = ctypes.create_string_buffer(unique_id, UNIQUE_ID_BYTES)  # FlagCX writes into it
        doing = f"rank {rank} of {world_size} joins a communicator"
        self.call("flagcxCommInitRank", byref(handle), world_size, theirs, rank, doing=doing)
        assert handle.value is not None
        return Communicator(self, handle.value, world_size, rank)

    def stream(self) -> Stream:
        """Create a side stream of this thread's current device; it waits for no other stream."""
        address = c_void_p()
        self.device("streamCreate", byref(address), doing="a side stream")
        assert address.value is not None
        return Stream(self, address.value, owned=True)

    def wrap(self, stream: Any) -> Stream:
        """``stream``, a stream of torch or one of ours, as one of ours.

        Raises:
            ValueError: it shows no raw handle.
        """
        if isinstance(stream, Stream):
            return stream
        raw = _raw_handle(stream)
        # Not by streamCopy: whether it takes the handle or its address differs by version and by vendor, while
        # ``struct flagcxStream`` is everywhere that one handle. Kept, as FlagCX's threads read it after the call.
        return self._wrapped.setdefault(raw, Stream(self, c_void_p(raw), owned=False))

    def call(self, name: str, *arguments: Any, doing: str, communicator: int | None = None) -> None:
        """Call by name; ``doing`` is for the message.

        Raises:
            RuntimeError: the result is not 0.
        """
        self.check(name, self.code(name, *arguments), doing, communicator)

    def code(self, name: str, *arguments: Any) -> int:
        """Call by name and return the result, 0 or not."""
        return getattr(self._library, name)(*arguments)

    def device(self, name: str, *arguments: Any, doing: str) -> None:
        """As :meth:`call`, for a function of the device."""
        self.check(name, getattr(self._device, name)(*arguments), doing)

    def check(self, name: str, code: int, doing: str, communicator: int | None = None) -> None:
        """Raise what :meth:`call` raises, for a ``code`` that is already there."""
        if code == 0:
            return
        meaning = _RESULTS[code] if 0 <= code < len(_RESULTS) else "unknown to this binding"
        said = self._said(code, communicator)
        raise RuntimeError(
            explain(
                f"{name} failed",
                asked=doing,
                found=f"code {code} ({meaning})" + (f": {said}" if said else ""),
                fix="look at the log of every rank; FLAGCX_DEBUG=INFO in their environment makes FlagCX say more",
            )
        )

    def _said(self, code: int, communicator: int | None) -> str:
        texts = [self._library.flagcxGetErrorString(code)]
        if communicator is not None:
            texts.insert(0, self._library.flagcxGetLastError(communicator))
        said = dict.fromkeys(text.decode(errors="replace").strip() for text in texts if text)
        return "; ".join(text for text in said if text and text != "Not implemented.")  # what most versions say


class Stream:
    """A queue of work of one device, made by :meth:`Library.stream` or :meth:`Library.wrap`."""

    def __init__(self, library: Library, address: int | c_void_p, *, owned: bool) -> None:
        self._library = library
        self._owned = owned
        self._handle = address if isinstance(address, c_void_p) else None  # ``struct flagcxStream``, where it is ours
        self._address = ctypes.addressof(address) if isinstance(address, c_void_p) else address

    @property
    def address(self) -> int:
        """The ``flagcxStream_t`` to give to FlagCX.

        Raises:
            RuntimeError: the stream is destroyed.
        """
        if not self._address:
            raise RuntimeError(explain("the stream is destroyed", fix="make another with Library.stream"))
        return self._address

    def synchronize(self) -> None:
        """Wait until the device has done all that was given to this stream."""
        self._library.device("streamSynchronize", self.address, doing="to wait for what was given to a stream")

    def destroy(self) -> None:
        """Give a side stream back; a second time, or for a stream of torch, it does nothing."""
        if self._owned and self._address:
            address, self._address = self._address, 0
            self._library.device("streamDestroy", address, doing="to give a stream back")


class Communicator:
    """The ranks that joined one id, made by :meth:`Library.communicator`.

    Sizes are in bytes, addresses are of this rank's device and stay valid until the stream is synchronised: a call only
    puts its work on the stream. Work on another stream, torch's own included, is not waited for. 0 bytes move nothing,
    and both sides know it, so nothing is called.
    """

    def __init__(self, library: Library, handle: int, world_size: int, rank: int) -> None:
        self.world_size = world_size
        self.rank = rank
        self._library = library
        self._handle: int | None = handle

    def send(self, address: int, size_bytes: int, peer: int, stream: Any) -> None:
        """Send to ``peer``, which receives as many bytes. Outside of a group, the device waits until it does.

        Args:
            stream: of ours or of torch.

        Raises:
            ValueError: there is no such peer, or nothing at that address.
            RuntimeError: FlagCX refuses, or the communicator is gone.
        """
        self._move("flagcxSend", f"sends {size_bytes} bytes to rank", (address,), size_bytes, peer, stream)

    def recv(self, address: int, size_bytes: int, peer: int, stream: Any) -> None:
        """Receive what ``peer`` sends; as :meth:`send`."""
        self._move("flagcxRecv", f"receives {size_bytes} bytes from rank", (address,), size_bytes, peer, stream)

    def broadcast(self, address: int, size_bytes: int, root: int, stream: Any) -> None:
        """Copy what ``root`` has at its address to the address of every other rank; all ranks call it."""
        buffers = (address, address)
        self._move("flagcxBroadcast", f"broadcasts {size_bytes} bytes with root", buffers, size_bytes, root, stream)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Start the calls inside together, at the end: what ranks send each other at once must be in one group.

        A group belongs to its thread. When the body raises, the group is closed all the same and may start what it
        holds; and after a failed end FlagCX up to 0.13 may still count the thread as inside. In both cases abort the
        communicator, and go on in another thread.
        """
        handle = self._alive()
        doing = f"rank {self.rank} of {self.world_size} groups calls"
        self._library.call("flagcxGroupStart", handle, doing=doing, communicator=handle)
        try:
            yield
        except BaseException:
            # Left open, it would swallow what this thread calls later. Its code would hide the error that matters.
            self._library.code("flagcxGroupEnd", handle)
            raise
        self._library.call("flagcxGroupEnd", handle, doing=doing, communicator=handle)

    def abort(self) -> bool:
        """Stop what runs and give the communicator up, from any thread; only other communicators work afterwards.

        Returns:
            Whether all of it stopped. False where the ranks are of several vendors: FlagCX up to 0.13 has no abort for
            the part between them, so that a thread may stay in its call, and memory that it was given in use.

        Raises:
            RuntimeError: FlagCX refuses for another reason.
        """
        handle, self._handle = self._handle, None
        if handle is None:
            return True
        code = self._library.code("flagcxCommAbort", handle)
        if code == _NOT_SUPPORTED:
            return False
        self._library.check("flagcxCommAbort", code, f"rank {self.rank} of {self.world_size} aborts")
        return True

    def destroy(self) -> None:
        """Leave, after the streams are synchronised, on every rank: it may wait for the others.

        Does nothing a second time or after :meth:`abort`.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.call("flagcxCommDestroy", handle, doing=f"rank {self.rank} of {self.world_size} leaves")

    def _move(self, name: str, verb: str, buffers: tuple[int, ...], size_bytes: int, peer: int, stream: Any) -> None:
        doing = f"rank {self.rank} of {self.world_size} {verb} {peer}"
        # FlagCX up to 0.13 checks neither, and a wrong one ends the process.
        if not 0 <= peer < self.world_size or size_bytes < 0 or (size_bytes > 0 and not buffers[0]):
            raise ValueError(
                explain(
                    "there is nothing to move",
                    asked=f"{doing}, at address {buffers[0]:#x}",
                    legal=f"rank 0 to {self.world_size - 1}, 0 bytes or more, an address that is not 0",
                    fix="correct the call",
                )
            )
        handle = self._alive()
        if size_bytes > 0:
            ends = (size_bytes, _UINT8, peer, handle, self._library.wrap(stream).address)
            self._library.call(name, *buffers, *ends, doing=doing, communicator=handle)

    def _alive(self) -> int:
        if self._handle is None:
            raise RuntimeError(
                explain(
                    f"the communicator of rank {self.rank} is gone",
                    found="it was destroyed or aborted",
                    fix="join another with Library.communicator",
                )
            )
        return self._handle


def check_ranks(vendors: Sequence[str]) -> None:
    """Check that FlagCX carries weights well between these ranks.

    Args:
        vendors: the vendor of each rank, in the order of the ranks.

    Raises:
        ValueError: a vendor's ranks do not follow one another (FlagCX would mix them up); or one of several vendors has
            a single rank (FlagCX up to 0.13 then stages broadcast through host memory; not send and recv).
    """
    ranks: dict[str, list[int]] = {}
    for rank, vendor in enumerate(vendors):
        ranks.setdefault(vendor, []).append(rank)
    found = ", ".join(f"{vendor}: {_plural(held)}" for vendor, held in ranks.items())
    scattered = [vendor for vendor, held in ranks.items() if held[-1] - held[0] >= len(held)]
    if scattered:
        raise ValueError(
            explain(
                "FlagCX needs the ranks of one vendor to follow one another",
                asked=f"a communicator of {len(vendors)} ranks, {' and '.join(scattered)} in several places",
                found=found,
                legal=f"all ranks of {', then all of '.join(ranks)}",
                fix="number the ranks vendor by vendor",
            )
        )
    single = [vendor for vendor, held in ranks.items() if len(held) == 1]
    if single and len(ranks) > 1:
        raise ValueError(
            explain(
                "FlagCX would stage what these ranks broadcast through host memory",
                asked=f"a communicator of {len(vendors)} ranks with a single one of {' and of '.join(single)}",
                found=found,
                legal="two ranks or more of each vendor",
                fix="take a second rank of that vendor along, a second trainer rank say, even if it sends nothing",
            )
        )


def _plural(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _raw_handle(stream: Any) -> int:
    """The vendor's own handle: the integer in torch's ``<device>_stream``, or in ``native_handle`` of newer torch."""
    handles = {}
    for name in dir(stream):
        if name.endswith("_stream") or name == "native_handle":
            with contextlib.suppress(RuntimeError):  # a native handle that this device does not have
                handles[name] = getattr(stream, name)
    handles = {name: handle for name, handle in handles.items() if isinstance(handle, int)}
    if len(set(handles.values())) != 1:
        raise ValueError(
            explain(
                "FlagCX can't put work on this stream",
                asked=repr(stream),
                found=", ".join(f"{name}={handle:#x}" for name, handle in handles.items()) or "no raw handle",
                legal="a stream of a device whose torch shows its raw handle, as <device>_stream",
                fix="use a side stream: Library.stream",
            )
        )
    return handles.popitem()[1]
