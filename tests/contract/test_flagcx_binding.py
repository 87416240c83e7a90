"""The binding to FlagCX's C API, in both its flavours, against a stand-in library, between processes."""

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import subprocess
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from verl_fl.platform import evidence
from verl_fl.weight_sync import flagcx

SOURCE = Path(__file__).with_name("libflagcx_stand_in.c")
SIZES = (0, 1, (1 << 20) + 3)
VENDORS = ("left", "left", "right", "right")
LIMIT_S = 30


def build(path, *flags):
    compiler = shutil.which((os.environ.get("CC") or "cc").split()[-1])
    assert compiler, "the stand-in library needs a C compiler (cc, or CC), once; apt install gcc"
    command = [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", *flags, str(SOURCE)]
    result = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return str(path)


@pytest.fixture(scope="module", params=["12", "13"], ids=["up to 0.12", "since 0.13"])
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"flagcx{request.param}")
    return build(folder / "libflagcx.so", f"-DFLAGCX_API={request.param}")


@pytest.fixture
def library(path):
    return flagcx.load(path)


@pytest.fixture
def alone(library):
    """A communicator of one rank, and a stream."""
    communicator, stream = library.communicator(library.unique_id(), 1, 0), library.stream()
    yield communicator, stream
    communicator.destroy()
    stream.destroy()


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def four(pool, path, library):
    """Runs a function of this module as rank 0 to 3 in four processes, and returns the four results."""

    def run(body, vendors=VENDORS):
        unique_id = library.unique_id()
        ranks = [pool.submit(_as_rank, body, path, unique_id, vendor, rank) for rank, vendor in enumerate(vendors)]
        return [rank.result(timeout=LIMIT_S) for rank in ranks]

    return run


def _as_rank(body, path, unique_id, vendor, rank):
    with environment(VENDOR=vendor):
        library = flagcx.load(path)
        communicator, stream = library.communicator(unique_id, 4, rank), library.stream()
        result = body(library, communicator, stream)
        communicator.destroy()
        communicator.destroy()
        stream.destroy()
        return result


@contextlib.contextmanager
def environment(**variables):
    names = {f"FLAGCX_STAND_IN_{name}": value for name, value in variables.items()}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


@pytest.fixture
def two(library):
    """Runs two functions as rank 0 and 1 in two threads, which share the counts of the stand-in's faults."""

    def run(*bodies):
        unique_id = library.unique_id()
        results = [None, None]

        def be(rank):
            try:
                results[rank] = bodies[rank](library.communicator(unique_id, 2, rank), library.stream())
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads)
        return results

    return run


class Memory:
    """Bytes with an address, 8 more than asked for to see what is written beyond."""

    def __init__(self, size, seed=None):
        text = bytes(size) if seed is None else (bytes((seed * 31 + i) % 251 for i in range(997)) * (size // 997 + 1))
        self.size = size
        self.buffer = ctypes.create_string_buffer(text[:size] + b"\xaa" * 8, size + 8)
        self.address = ctypes.addressof(self.buffer)

    def __eq__(self, other):
        return self.buffer.raw == other.buffer.raw


def both_ways(library, communicator, stream):
    """With the partner of the other vendor, then with that of the own."""
    for partner in (communicator.rank ^ 2, communicator.rank ^ 1):
        for size in SIZES:
            ours, theirs = Memory(size, communicator.rank), Memory(size)
            with communicator.group():
                communicator.send(ours.address, size, partner, stream)
                communicator.recv(theirs.address, size, partner, stream)
            stream.synchronize()
            assert theirs == Memory(size, partner), (partner, size)


def around_a_ring(library, communicator, stream):
    """Several messages to each neighbour in one group, which must keep their order."""
    after, before = (communicator.rank + 1) % 4, (communicator.rank - 1) % 4
    sizes = (SIZES[2], 1, 77_777)
    out = [Memory(size, communicator.rank + 10 * i) for i, size in enumerate(sizes)]
    into = [Memory(size) for size in sizes]
    with communicator.group():
        for memory in out:
            communicator.send(memory.address, memory.size, after, stream)
        for memory in into:
            communicator.recv(memory.address, memory.size, before, stream)
    stream.synchronize()
    assert into == [Memory(size, before + 10 * i) for i, size in enumerate(sizes)]


def from_every_root(library, communicator, stream):
    for root in range(4):
        for size in SIZES:
            memory = Memory(size, root + 5) if root == communicator.rank else Memory(size)
            communicator.broadcast(memory.address, size, root, stream)
            stream.synchronize()
            assert memory == Memory(size, root + 5), (root, size)


def one_after_another(library, communicator, stream):
    """Ungrouped, in a chain, and on a stream that is not ours but has a raw handle."""

    class Foreign:
        foreign_stream = ctypes.c_void_p.from_address(stream.address).value

    memory = Memory(SIZES[2], 3) if communicator.rank == 0 else Memory(SIZES[2])
    if communicator.rank > 0:
        communicator.recv(memory.address, memory.size, communicator.rank - 1, Foreign())
    if communicator.rank < 3:
        communicator.send(memory.address, memory.size, communicator.rank + 1, Foreign())
    library.wrap(Foreign()).synchronize()
    assert memory == Memory(SIZES[2], 3)


def nothing_between_vendors_can_be_aborted(library, communicator, stream):
    with environment(HANG="flagcxSend:1"):
        memory = Memory(8, 1)
        call = threading.Thread(target=communicator.send, args=(memory.address, 8, 0, stream), daemon=True)
        call.start()
        call.join(0.2)
        assert call.is_alive()
        stopped = communicator.abort()
        call.join(0.2)
        return stopped, call.is_alive()


def test_two_ranks_of_two_vendors_each_send_both_ways_in_a_group(four):
    four(both_ways)


def test_messages_of_one_group_keep_their_order(four):
    four(around_a_ring)


def test_every_rank_can_be_the_root_of_a_broadcast(four):
    four(from_every_root)


def test_calls_outside_of_a_group_and_on_a_foreign_stream(four):
    four(one_after_another)


def test_between_vendors_an_abort_says_that_a_call_may_go_on(four):
    """FlagCX has no abort there; the caller must be able to leave the thread."""
    assert four(nothing_between_vendors_can_be_aborted) == [(False, True)] * 4


def test_the_flavour_is_told_by_the_library(path, library):
    assert library.api == ("devHandle" if "flagcx13" in path else "handle")
    assert library.version() == "1.0.0" and flagcx.load(path) is library


def test_an_id_is_256_bytes_and_another_each_time(library):
    first, second = library.unique_id(), library.unique_id()
    assert len(first) == len(second) == 256 and first != second
    assert first[-1] == 7, "the bytes behind the first 0 are part of it"


def test_joining_leaves_the_callers_id_as_it_is(library):
    unique_id = library.unique_id()
    before = bytes(bytearray(unique_id))
    library.communicator(unique_id, 1, 0).destroy()
    assert unique_id == before


@pytest.mark.parametrize(("length", "size", "rank"), [(255, 2, 0), (256, 2, 2), (256, 2, -1), (256, 0, 0)])
def test_a_communicator_that_can_not_be_is_refused_before_the_library_sees_it(library, length, size, rank):
    with pytest.raises(ValueError, match=f"rank {rank} of {size} with an id of {length} bytes"):
        library.communicator(bytes(length), size, rank)


def test_what_the_library_refuses_is_said_in_its_words(path, library):
    with pytest.raises(RuntimeError, match="flagcxCommInitRank failed") as error:
        library.communicator(bytes(256), 4, 1)
    assert "asked: rank 1 of 4 joins" in str(error.value)
    assert "found: code 4 (flagcxInvalidArgument)" in str(error.value) and "Not implemented" not in str(error.value)
    assert ("(flagcxInvalidArgument): invalid argument" in str(error.value)) == ("flagcx13" in path)


@pytest.mark.parametrize("call", ["flagcxGetUniqueId", "streamCreate"])
def test_a_failure_without_a_communicator_names_the_call(library, call):
    with environment(FAIL=f"{call}:1"), pytest.raises(RuntimeError, match=rf"{call} failed\n(.*\n)*.*code 2"):
        library.unique_id() if call == "flagcxGetUniqueId" else library.stream()


def test_the_nth_send_fails_with_call_code_text_rank_and_peer(two):
    memory = Memory(5, 1)

    def send(communicator, stream):
        communicator.send(memory.address, 5, 1, stream)
        communicator.send(memory.address, 5, 1, stream)

    def receive(communicator, stream):
        communicator.recv(memory.address, 5, 0, stream)
        stream.synchronize()

    with environment(FAIL="flagcxSend:2@0"):
        error, fine = two(send, receive)
    assert fine is None and isinstance(error, RuntimeError)
    assert str(error).startswith("flagcxSend failed\n  asked: rank 0 of 2 sends 5 bytes to rank 1\n")
    assert "found: code 2 (flagcxSystemError): the stand-in was told to fail this flagcxSend" in str(error)
    assert "do: look at the log of every rank" in str(error)


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        ("flagcxRecv", "rank 0 of 1 receives 5 bytes from rank 0"),
        ("flagcxBroadcast", "rank 0 of 1 broadcasts 5 bytes with root 0"),
        ("flagcxGroupStart", "rank 0 of 1 groups calls"),
        ("flagcxGroupEnd", "rank 0 of 1 groups calls"),
        ("flagcxCommAbort", "rank 0 of 1 aborts"),
        ("flagcxCommDestroy", "rank 0 of 1 leaves"),
        ("streamSynchronize", "to wait"),
    ],
)
def test_every_call_reports_its_failure(alone, call, asked):
    communicator, stream = alone
    memory = Memory(5)
    with environment(FAIL=f"{call}:1"), pytest.raises(RuntimeError, match=f"{call} failed") as error:
        with communicator.group():
            if call in ("flagcxRecv", "flagcxBroadcast"):
                getattr(communicator, call[len("flagcx") :].lower())(memory.address, 5, 0, stream)
        stream.synchronize()
        communicator.abort() if call == "flagcxCommAbort" else communicator.destroy()
    assert f"asked: {asked}" in str(error.value) and "code 2 (flagcxSystemError)" in str(error.value)


def test_a_call_that_hangs_ends_when_another_thread_aborts(two):
    memory = Memory(5, 1)

    def hang(communicator, stream):
        threading.Timer(0.1, communicator.abort).start()
        communicator.send(memory.address, 5, 1, stream)

    with environment(HANG="flagcxSend:1@0"):
        hung, other = two(hang, lambda communicator, stream: communicator.abort())
    assert other is True and "flagcxSend was aborted" in str(hung)


def test_work_that_no_peer_answers_ends_when_it_is_aborted(two):
    memory = Memory(5)

    def wait(communicator, stream):
        communicator.recv(memory.address, 5, 1 - communicator.rank, stream)
        assert communicator.abort() and communicator.abort()
        communicator.destroy()
        with pytest.raises(RuntimeError, match="streamSynchronize failed"):
            stream.synchronize()
        return "ended"

    assert two(wait, wait) == ["ended", "ended"]


def test_a_peer_that_goes_is_an_error_where_its_work_is_waited_for(two):
    memory = Memory(5)

    def wait(communicator, stream):
        communicator.recv(memory.address, 5, 1, stream)
        stream.synchronize()

    error, _ = two(wait, lambda communicator, stream: communicator.destroy())
    assert "streamSynchronize failed" in str(error) and "code 6 (flagcxRemoteError)" in str(error)


def test_sizes_that_do_not_match_are_an_error_of_the_receiver(two):
    memory = Memory(5)

    def receive(communicator, stream):
        communicator.recv(memory.address, 4, 0, stream)
        stream.synchronize()

    _, error = two(lambda communicator, stream: communicator.send(memory.address, 5, 1, stream), receive)
    assert "code 5 (flagcxInvalidUsage)" in str(error)


def test_the_stand_in_flips_one_bit_of_the_nth_receive(two):
    sent, received = Memory(999, 1), [Memory(999) for _ in range(3)]

    def send(communicator, stream):
        for _ in received:
            communicator.send(sent.address, 999, 1, stream)
        stream.synchronize()

    def receive(communicator, stream):
        for memory in received:
            communicator.recv(memory.address, 999, 0, stream)
        stream.synchronize()

    with environment(FLIP="flagcxRecv:2"):
        assert two(send, receive) == [None, None]
    differing = [sum(a != b for a, b in zip(m.buffer.raw, sent.buffer.raw, strict=True)) for m in received]
    assert differing == [0, 1, 0]


def test_a_group_whose_body_raises_is_closed(two):
    """The thread's next calls would otherwise wait for its end for ever."""
    memory = Memory(5, 1)

    def send(communicator, stream):
        with pytest.raises(KeyError), communicator.group():
            raise KeyError("ours")
        communicator.send(memory.address, 5, 1, stream)
        stream.synchronize()

    received = Memory(5)

    def receive(communicator, stream):
        communicator.recv(received.address, 5, 0, stream)
        stream.synchronize()

    assert two(send, receive) == [None, None] and received == memory


def test_a_destroyed_communicator_and_stream_say_so(library):
    communicator, stream = library.communicator(library.unique_id(), 1, 0), library.stream()
    memory = Memory(5)
    communicator.destroy()
    communicator.destroy()
    assert communicator.abort() is True
    with pytest.raises(RuntimeError, match="the communicator of rank 0 is gone"):
        communicator.broadcast(memory.address, 5, 0, stream)
    with pytest.raises(RuntimeError, match="is gone"), communicator.group():
        pass
    stream.destroy()
    stream.destroy()
    with pytest.raises(RuntimeError, match="the stream is destroyed"):
        stream.synchronize()


@pytest.mark.parametrize(("address", "size", "peer"), [(1, 5, 1), (1, 5, -1), (1, -1, 0), (0, 5, 0)])
@pytest.mark.parametrize("call", ["send", "recv", "broadcast"])
def test_what_would_crash_the_library_is_refused(alone, call, address, size, peer):
    communicator, stream = alone
    with pytest.raises(ValueError, match="there is nothing to move") as error:
        getattr(communicator, call)(address, size, peer, stream)
    assert f" {size} bytes " in str(error.value) and f" {peer}, at address {address:#x}" in str(error.value)


def test_no_bytes_need_no_call(alone):
    communicator, stream = alone
    with environment(FAIL="flagcxSend:1"):
        communicator.send(0, 0, 0, stream)


def test_a_stream_is_known_by_its_raw_handle_whatever_the_device_calls_it(library):
    class Aliased:
        one_stream = other_stream = 0x1000

        def wait_stream(self):
            raise AssertionError

    class Native:
        native_handle = 0x1000

    wrapped = library.wrap(Aliased())
    assert ctypes.c_void_p.from_address(wrapped.address).value == 0x1000
    assert library.wrap(Native()) is wrapped and library.wrap(wrapped) is wrapped
    wrapped.destroy()
    assert wrapped.address, "it is torch's to destroy"


def test_the_default_stream_of_a_device_has_the_handle_0(library):
    class Default:
        any_stream = 0

    library.wrap(Default()).synchronize()


def test_a_stream_without_one_raw_handle_is_refused(library):
    import torch

    class Ambiguous:
        one_stream, other_stream = 1, 2

    for stream in (torch.Stream(device="cpu"), None, Ambiguous()):
        with pytest.raises(ValueError, match="FlagCX can't put work on this stream"):
            library.wrap(stream)


def test_a_handle_that_is_no_stream_is_the_librarys_error(alone):
    class Wrong:
        wrong_stream = ctypes.addressof(ctypes.create_string_buffer(64))

    communicator, _ = alone
    memory = Memory(5)
    with pytest.raises(RuntimeError, match="that is no stream of this device"):
        communicator.broadcast(memory.address, 5, 0, Wrong())


def test_it_is_found_as_the_platform_room_finds_it(monkeypatch, path, tmp_path):
    monkeypatch.setattr(evidence, "ROOT", tmp_path / "root")
    monkeypatch.setenv("FLAGCX_PATH", str(Path(path).parent))
    assert flagcx.load().path == path


def test_absent_says_where_it_looked_and_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setenv("FLAGCX_PATH", "/opt/nothing")
    with pytest.raises(RuntimeError, match="FlagCX is not here") as error:
        flagcx.load()
    assert "found: no libflagcx.so in /opt/nothing" in str(error.value)
    assert "do: build FlagCX for this chip and set FLAGCX_PATH to it" in str(error.value)


def test_a_file_that_is_no_library_or_no_flagcx_is_said(tmp_path):
    wrong = tmp_path / "libflagcx.so"
    with pytest.raises(RuntimeError, match=r"can't be used as FlagCX\n(.*\n)*  found: .*No such file"):
        flagcx.load(str(wrong))
    wrong.write_text("no library")
    with pytest.raises(RuntimeError, match=r"can't be used as FlagCX\n(.*\n)*  found: .*(invalid ELF|too short)"):
        flagcx.load(str(wrong))
    with pytest.raises(RuntimeError, match="flagcxDeviceHandleInit or flagcxHandleInit") as error:
        flagcx.load("libc.so.6")
    assert "found: no flagcxGetVersion, flagcxGetUniqueId" in str(error.value)


@pytest.mark.parametrize("name", ["flagcxRecv", "flagcxMemAlloc"])
def test_a_missing_function_is_named(tmp_path, name):
    with pytest.raises(RuntimeError, match=rf"found: no {name}\n"):
        flagcx.load(build(tmp_path / "libflagcx.so", f"-D{name}=renamed"))


@pytest.mark.parametrize("vendors", ["", "a", "aa", "aabb", "aaabbcc"])
def test_ranks_that_flagcx_serves_well_are_accepted(vendors):
    flagcx.check_ranks(list(vendors))


def test_scattered_ranks_of_a_vendor_are_refused():
    with pytest.raises(ValueError, match="ranks of one vendor to follow one another") as error:
        flagcx.check_ranks(["acme", "acme", "other", "other", "acme"])
    assert "5 ranks, acme in several places" in str(error.value)
    assert "found: acme: ranks 0, 1, 4, other: ranks 2, 3" in str(error.value)
    assert "legal: all ranks of acme, then all of other" in str(error.value)
    with pytest.raises(ValueError, match="to follow one another"):
        flagcx.check_ranks(["acme", "other", "acme"])


@pytest.mark.parametrize(("vendors", "single"), [(["acme", "other", "other"], "acme"), (["a", "a", "b"], "b")])
def test_a_single_rank_of_one_of_several_vendors_is_refused(vendors, single):
    with pytest.raises(ValueError, match="through host memory") as error:
        flagcx.check_ranks(vendors)
    assert f"with a single one of {single}" in str(error.value) and "a second trainer rank say" in str(error.value)
