"""The wire format, byte for byte as docs/weight-sync.md describes it, and the layout that both ends compute."""

import hashlib
import hmac
import itertools
import struct

import pytest
import torch

from verl_fl.weight_sync import link, manifest, memory, plan
from verl_fl.weight_sync.manifest import Entry, Manifest
from verl_fl.weight_sync.outlets import Below
from verl_fl.weight_sync.plan import Seen


def test_an_entry_travels_as_documented():
    entry = Entry("lm_head.weight", torch.bfloat16, (3, 5))
    alias = Entry("é", torch.float8_e4m3fn, (), alias_of=0)
    expected = bytes.fromhex("0e000802ffffffff") + b"lm_head.weightbfloat16" + struct.pack("<QQ", 3, 5)
    expected += bytes.fromhex("02000d0000000000") + "é".encode() + b"float8_e4m3fn"
    assert manifest.pack([entry, alias]) == expected
    assert manifest.unpack(expected) == [entry, alias]


def test_a_frame_travels_as_documented():
    frame = link.Frame(link.BUCKET, 7, 1 << 20, 3, 9, link.DELTA, 0x1122334455667788, b"meta")
    packed = link._pack(frame)
    head = bytes.fromhex("56464c4610010000070000000000000000001000000000000300000000000000")
    head += bytes.fromhex("090000000000000004000000000000008877665544332211")
    assert packed == head + (0x72778B939114E320).to_bytes(8, "little") + b"meta" and len(head) == 56


def test_the_handshake_travels_as_documented():
    assert link._HELLO.size == link._ANSWER.size == 64
    hello, answer = bytes(range(64)), bytes(range(64, 128))
    expected = hmac.new(b"secret", b"verl-fl weight sync listen" + hello + answer, hashlib.sha256).digest()
    assert link._proof(b"secret", b"listen", hello, answer) == expected


DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.int64)


@pytest.mark.parametrize("bucket_bytes", [64, 128, 1 << 20])
def test_every_order_of_mixed_dtypes_lies_aligned_and_apart(bucket_bytes):
    for order in itertools.permutations(DTYPES):
        tensors = [torch.arange(1, 40 + k).to(dtype) for k, dtype in enumerate(order)]
        found = Manifest(bucket_bytes, [Entry(str(k), t.dtype, tuple(t.shape)) for k, t in enumerate(tensors)])
        assert all(offset % 64 == 0 for offset in found.offsets)
        sent = [memory.view(tensor) for tensor in tensors]
        copies = [torch.zeros_like(tensor) for tensor in tensors]
        received = [memory.view(copy) for copy in copies]
        for bucket in range(found.num_buckets):
            data = b"".join(memory.parts_of(found, bucket, sent))
            assert len(data) == found.bucket_size(bucket)
            at = 0
            for part in memory.parts_of(found, bucket, received, bytearray(64)):
                part[:] = data[at : at + len(part)]
                at += len(part)
        assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))


def test_what_has_no_bytes_of_its_own_takes_no_place():
    entries = [
        Entry("a", torch.float32, (4,)),
        Entry("none", torch.float32, (0, 3)),
        Entry("tied", torch.float32, (4,), alias_of=0),
        Entry("b", torch.uint8, (1,)),
    ]
    found = Manifest(64, entries)
    assert found.offsets == [0, 64, 0, 64] and found.num_bytes == 65
    assert [(p.tensor, p.start, p.size, p.offset) for k in range(2) for p in found.pieces(k)] == [
        (0, 0, 16, 0),
        (3, 0, 1, 0),
    ]
    with pytest.raises(ValueError, match="'a' comes twice"):
        found.append(entries[0])
    with pytest.raises(ValueError, match="no such tensor"):
        found.append(Entry("c", torch.float16, (4,), alias_of=0))


def _seen(name, host="", mode="full", speed=0.0):
    return Seen(Below(f"tcp://{name}:1", host or name, ""), mode, speed)


def _parents(receivers, **options):
    options = {"topology": "auto", "num_bytes": 1 << 30, "bucket_bytes": 1 << 20} | options
    found = plan.parents(receivers, "trainer", **options)
    short = {address: address.removeprefix("tcp://").removesuffix(":1") for address in found}
    return {short[a]: parent and short[parent] for a, parent in found.items()}


def test_hosts_form_a_chain_with_the_fastest_first_and_feed_their_own():
    receivers = [
        _seen("slow", speed=1e8),
        _seen("fast", speed=1e9),
        _seen("fast2", host="fast", speed=9e8),
        _seen("here", host="trainer"),
    ]
    assert _parents(receivers) == {"here": None, "fast": None, "fast2": "fast", "slow": "fast"}


def test_a_small_model_for_many_hosts_takes_a_tree_and_a_large_one_a_chain():
    receivers = [_seen(str(k)) for k in range(15)]
    chain = _parents(receivers)
    assert chain == {"0": None, **{str(k): str(k - 1) for k in range(1, 15)}}
    tree = _parents(receivers, num_bytes=1 << 20)
    assert tree == {"0": None, **{str(k): str((k - 1) // 2) for k in range(1, 15)}}
    assert set(_parents(receivers, topology="star").values()) == {None}


def test_receivers_of_deltas_and_of_everything_feed_their_own_kind():
    receivers = [_seen("a"), _seen("b", mode="delta"), _seen("c"), _seen("d", mode="delta")]
    assert _parents(receivers) == {"a": None, "c": "a", "b": None, "d": "b"}
