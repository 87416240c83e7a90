"""Weight sync and what a user may get wrong: the message says what was asked, found and legal, and what to do."""

from __future__ import annotations

import contextlib
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from weight_sync_faults import SECRET, SENTINEL, Result, Together, differing, model, nothing_left, owned

from verl_fl.weight_sync import Receiver, Sender, SyncError, link, manifest
from verl_fl.weight_sync.link import BEGIN, CONTROL, MANIFEST, PLAN, READY, STATE, Hello


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield


def _sync(receiver: Receiver, weights: Any, **options: Any) -> tuple[Result, Result]:
    with Sender([receiver.address], secret=SECRET, timeout_s=1.0, **options) as sender:
        together = Together()
        sent, got = together.call(sender.send, weights, 1), together.call(receiver.receive, 1.0)
        together.wait(6)
    return sent, got


@pytest.mark.parametrize(
    "options, problem, asked, legal",
    [
        ({"bucket_bytes": 0}, "no such size of a bucket", "bucket_bytes=0", "a multiple of 64 from 64 to 2147483648"),
        ({"bucket_bytes": 1}, "no such size of a bucket", "bucket_bytes=1", "a multiple of 64"),
        ({"bucket_bytes": 4095}, "no such size of a bucket", "bucket_bytes=4095", "a multiple of 64"),
        ({"bucket_bytes": 1 << 40}, "no such size of a bucket", f"bucket_bytes={1 << 40}", "to 2147483648"),
        ({"transport": "rdma"}, "no such transport", "'rdma'", "auto, shm, unix, tcp"),
        ({"transport": {"tcp://a:1": "pigeon"}}, "no such transport", "'pigeon'", "auto, shm, unix, tcp"),
        ({"topology": "ring"}, "no such topology", "'ring'", "auto, chain, star, tree"),
        ({"lanes": 0}, "no such number of lanes", "0", "1 to 64"),
        ({"rank": 2, "num_ranks": 2}, "no such rank", "rank 2 of 2", "0 <= rank < num_ranks"),
        ({"secret": "short"}, "this secret is too short", "5 bytes", "8 bytes or more"),
        ({"addresses": ["tcp://a:1", "tcp://a:1"]}, "a receiver is named twice", "tcp://a:1, tcp://a:1", None),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_argument_of_a_sender_that_is_none_is_refused_with_what_is_legal(options, problem, asked, legal):
    with pytest.raises(ValueError) as caught:
        Sender(**{"addresses": ["tcp://a:1"], "secret": SECRET} | options)
    said = str(caught.value)
    assert said.startswith(problem) and f"asked: {asked}" in said
    assert legal is None or re.search(rf"legal: .*{re.escape(legal)}", said)


@pytest.mark.parametrize(
    "address", ["", "host", "tcp://host", "tcp://host:0", "tcp://host:70000", "tcp://::1:5", "a:b"]
)
def test_what_is_no_address_is_refused_with_an_example(address):
    with pytest.raises(ValueError, match="legal: tcp://host:port") as caught:
        Sender([address], secret=SECRET)
    assert repr(address) in str(caught.value) and "receiver.address" in str(caught.value)


def test_a_sender_without_receivers_says_so():
    with Sender([], secret=SECRET) as sender, pytest.raises(ValueError, match="no receiver.*\n.*addresses"):
        sender.send({"a": torch.ones(1)})


@contextlib.contextmanager
def _memory_left(num_bytes: int) -> Iterator[None]:
    """This process can map so much more, and no more."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("transport, message", [("shm", "no shared memory for 4 buckets"), ("tcp", "no host memory")])
def test_a_bucket_larger_than_memory_fails_the_sync_and_says_what_to_do(transport, message):
    with Receiver({"a": torch.zeros(5)}, secret=SECRET, host="127.0.0.1", timeout_s=1.0) as receiver:
        with _memory_left(1 << 29):
            weights = iter({"a": torch.ones(5)}.items())
            sent, got = _sync(receiver, weights, bucket_bytes=1 << 31, transport=transport)
        assert (
            isinstance(sent.error, SyncError) and message in str(sent.error) and "2147483648 bytes" in str(sent.error)
        )
        assert "do: use smaller buckets" in str(sent.error) and message in str(got.error)
        sent, got = _sync(receiver, {"a": torch.ones(5)})
        assert sent.ok and got.ok


def test_a_receiver_without_memory_for_a_tensor_names_it():
    with Receiver(None, secret=SECRET, host="127.0.0.1", timeout_s=1.0) as receiver:
        together = Together()
        got = together.call(lambda: list(receiver.stream(1.0)))
        sender, _ = link.dial(receiver.address, Hello(CONTROL, b"s" * 16), SECRET, 1.0)
        sender.send(BEGIN, 5, {"ranks": 1, "version": 1, "base": 0, "sync": 5})
        assert sender.receive().kind == STATE
        sender.send(PLAN, 5, {"bucket_bytes": 4096, "mode": "full", "below": []})
        assert sender.receive().kind == READY
        sender.send(MANIFEST, 5, manifest.pack([manifest.Entry("big", torch.float32, (1 << 43,))]))
        together.wait(3)
        sender.close()
        assert isinstance(got.error, SyncError)
        assert f"no memory for {1 << 45} bytes" in str(got.error) and "big float32[8796093022208]" in str(got.error)
        assert "do: give the process more memory" in str(got.error)


def test_a_range_of_ports_in_which_none_is_free_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError) as caught:
            Receiver({}, secret=SECRET, host="127.0.0.1", ports=(port, port))
    said = str(caught.value)
    assert "no port is free on 127.0.0.1" in said and f"asked: ports {port} to {port}" in said
    assert "legal: " in said and "do: widen the range" in said


@pytest.mark.parametrize("ports", [(0, 5), (5, 4), (1, 70_000), (-1, 3)])
def test_what_is_no_range_of_ports_is_refused(ports):
    with pytest.raises(ValueError, match=f"asked: {ports[0]}-{ports[1]}"):
        Receiver({}, secret=SECRET, host="127.0.0.1", ports=ports)


def test_receivers_of_one_node_take_the_ports_of_their_range_and_give_them_back():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        first = min(probe.getsockname()[1], 65500)
    for _ in range(2):
        made = [Receiver({}, secret=SECRET, host="127.0.0.1", ports=(first, first + 20)) for _ in range(3)]
        found = [int(receiver.address.rpartition(":")[2]) for receiver in made]
        assert len(set(found)) == 3 and all(first <= port <= first + 20 for port in found)
        for receiver in made:
            receiver.close()


def test_the_address_of_another_node_is_refused():
    with pytest.raises(RuntimeError, match="192.0.2.1 is an address of another node\n.*do: leave host out"):
        Receiver({}, secret=SECRET, host="192.0.2.1")
    with pytest.raises(ValueError, match="is no address"):
        Receiver({}, secret=SECRET, host="300.0.0.1.")


def test_ipv6_works():
    try:
        receiver = Receiver(targets := owned(SENTINEL), secret=SECRET, host="::1", timeout_s=1.0)
    except (RuntimeError, ValueError, OSError):
        pytest.skip("this machine has no IPv6")
    with receiver:
        assert re.fullmatch(r"tcp://\[::1\]:\d+", receiver.address)
        sent, got = _sync(receiver, model(1), transport="tcp")
        assert sent.ok and got.ok and not differing(targets, 1)
        assert sent.value.edges == {receiver.address: "tcp"}


def test_names_on_one_side_only_are_listed_up_to_ten():
    ours = {f"ours.{k}": torch.ones(2) for k in range(13)}
    theirs = {f"theirs.{k}": torch.ones(2) for k in range(11)}
    both = {"both": torch.ones(2), "other shape": torch.ones(2, 3)}
    targets = theirs | both | {"other shape": torch.ones(3, 2)}
    with Receiver(targets, secret=SECRET, host="127.0.0.1", timeout_s=1.0) as receiver:
        sent, got = _sync(receiver, ours | both)
    assert isinstance(sent.error, SyncError) and isinstance(got.error, SyncError)
    for said in (str(sent.error), str(got.error)):
        assert "1 of another shape: other shape [2, 3] (here [3, 2])" in said
        assert "13 unknown here: ours.0, ours.1, ours.2" in said and "ours.9 and 3 more" in said
        assert "11 missing: theirs.0" in said and "theirs.9 and 1 more" in said
        assert "ours.10" not in said and "theirs.10" not in said


@pytest.mark.parametrize(
    "weights, message",
    [
        ([("a", 3)], "a name and a tensor, not str, int"),
        ([(3, torch.ones(1))], "a name and a tensor, not int, Tensor"),
        ([torch.ones(2)], "a name and a tensor"),
        ([3], "a name and a tensor"),
        ({"a": torch.ones(2).to_sparse()}, "only dense tensors"),
        ({"a": torch.ones(2, device="meta")}, "only dense tensors with data"),
        ({"a": 3}, "a name and a tensor, not str, int"),
        ({"x" * 5000: torch.ones(2)}, "at most 4096 bytes"),
    ],
    ids=["int", "name", "no pair", "no pair at all", "sparse", "meta", "int in a mapping", "long name"],
)
def test_what_are_no_weights_is_a_value_error_and_the_receiver_hears_of_it(weights, message):
    with Receiver({"a": torch.zeros(2)}, secret=SECRET, host="127.0.0.1", timeout_s=1.0) as receiver:
        sent, got = _sync(receiver, weights)
        assert isinstance(sent.error, ValueError) and message in str(sent.error)
        assert isinstance(got.error, SyncError) and message in str(got.error)
        sent, got = _sync(receiver, {"a": torch.ones(2)})
        assert sent.ok and got.ok


def test_a_firewall_that_drops_is_an_error_in_time_that_names_both_ends():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        for _ in range(4):  # the queue is full, and the kernel drops what more comes
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        time.sleep(0.05)
        begin = time.monotonic()
        with Sender([address], secret=SECRET, timeout_s=0.6) as sender, pytest.raises(SyncError) as caught:
            sender.send({"a": torch.ones(1)})
        assert time.monotonic() - begin < 2.0
    said = str(caught.value)
    assert f"{socket.gethostname()} got no answer from {address} in 0.6 s" in said
    assert "firewall" in said and caught.value.phase == "dial" and caught.value.peer == address


def test_a_listener_that_never_answers_is_an_error_in_time():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        begin = time.monotonic()
        with Sender([address], secret=SECRET, timeout_s=0.5) as sender, pytest.raises(SyncError) as caught:
            sender.send({"a": torch.ones(1)})
        assert time.monotonic() - begin < 2.0
    assert "no answer to the handshake" in str(caught.value) and caught.value.peer == address


def test_one_of_two_receivers_that_is_not_there_fails_the_sync_and_touches_no_weights():
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    targets = owned(SENTINEL)
    with (
        Receiver(targets, secret=SECRET, host="127.0.0.1", timeout_s=1.0) as receiver,
        Sender([receiver.address, nobody], secret=SECRET, timeout_s=1.0) as sender,
    ):
        together = Together()
        got, sent = together.call(receiver.receive, 0.5), together.call(sender.send, model(1), 1)
        together.wait(3)
        assert isinstance(sent.error, SyncError) and sent.error.peer == nobody
        assert isinstance(got.error, SyncError) and receiver.state == "empty"
        assert not differing(targets, SENTINEL)
        sender.addresses = [receiver.address]
        together = Together()
        got, sent = together.call(receiver.receive, 1.0), together.call(sender.send, model(2), 2)
        together.wait(3)
        assert got.ok and sent.ok and not differing(targets, 2)


def test_both_ends_do_one_sync_at_a_time():
    with Receiver({"a": torch.zeros(1)}, secret=SECRET, host="127.0.0.1") as receiver:
        together = Together()
        got = together.call(receiver.receive, 0.4)
        limit = time.monotonic() + 0.3
        while receiver.incoming is None and time.monotonic() < limit:
            time.sleep(0.005)
        with pytest.raises(RuntimeError, match="in a sync already"):
            receiver.receive(0.1)
        together.wait(3)
        assert "no sender came" in str(got.error)
        with Sender([receiver.address], secret=SECRET) as sender:
            together, inside, out = Together(), threading.Event(), threading.Event()

            def weights() -> Iterator[tuple[str, torch.Tensor]]:
                inside.set()
                out.wait(3)
                yield "a", torch.ones(1)

            sent, got = together.call(sender.send, weights()), together.call(receiver.receive, 2.0)
            assert inside.wait(2)
            with pytest.raises(RuntimeError, match="in a sync already"):
                sender.send({"a": torch.ones(1)})
            out.set()
            together.wait(3)
            assert sent.ok and got.ok
