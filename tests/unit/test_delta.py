"""The delta codec: its bytes, its losslessness, and what it does with a payload that lies, for each implementation."""

import logging
import threading

import pytest
import torch

from verl_fl._compile import Unavailable
from verl_fl.weight_sync import delta
from verl_fl.weight_sync.delta import BITMAP, FULL, LIST, SAME, STEPS

INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GUARD = 64


def implementation(name):
    """What ``delta._chosen`` is set to: torch, or C with no more of the processor than the level says."""
    flags = {"c": (), "c-avx2": ("-DDELTA_LEVEL=1",), "c-portable": ("-DDELTA_LEVEL=0",)}
    return (None, "torch: for a test") if name == "torch" else (delta._load(*flags[name]), f"C: {name}")


IMPLEMENTATIONS = ("c", "c-avx2", "c-portable", "torch")


@pytest.fixture(params=IMPLEMENTATIONS)
def each(request, monkeypatch):
    monkeypatch.setattr(delta, "_chosen", implementation(request.param))


def integers(values, itemsize):
    return torch.tensor(values, dtype=INTEGER[itemsize]).view(torch.uint8)


def encoded(new, old, itemsize):
    """Encoding, payload, number of changes; the old piece must have become the new one, and nothing else."""
    n = new.numel()
    room = torch.full((GUARD + n + GUARD,), 0xA5, dtype=torch.uint8)
    sender = room[GUARD : GUARD + n]
    sender.copy_(old)
    kept = new.clone()
    out = torch.full((delta.bound(n) + GUARD,), 0x5A, dtype=torch.uint8)
    encoding, size, changed = delta.encode(new, sender, itemsize, out[: delta.bound(n)])
    assert torch.equal(sender, new) and torch.equal(new, kept)
    assert (room[:GUARD] == 0xA5).all() and (room[GUARD + n :] == 0xA5).all(), "written beside the old piece"
    assert (out[delta.bound(n) :] == 0x5A).all(), "written beyond the bound"
    return encoding, bytes(out[:size].numpy()), changed


def applied(old, payload, encoding, itemsize):
    """The piece that comes of it and the count; no byte beside the target may change."""
    n = old.numel()
    room = torch.full((GUARD + n + GUARD,), 0xA5, dtype=torch.uint8)
    target = room[GUARD : GUARD + n]
    target.copy_(old)
    data = torch.tensor(list(payload), dtype=torch.uint8)
    try:
        return target, delta.apply(target, data, encoding, itemsize)
    finally:
        assert (room[:GUARD] == 0xA5).all() and (room[GUARD + n :] == 0xA5).all(), "written beside the target"


def pair(elements, itemsize, density, kind, generator):
    """Two versions of a piece: changes by one, by up to 200, or by any bits."""
    old = torch.randint(0, 256, (elements * itemsize,), dtype=torch.uint8, generator=generator)
    new = old.clone()
    chosen = torch.rand(elements, generator=generator) < density
    if kind == "bits":
        bits = torch.randint(0, 256, (elements, itemsize), dtype=torch.uint8, generator=generator)
        new.view(elements, itemsize)[chosen] = bits[chosen]
    else:
        most = 1 if kind == "ones" else 200
        steps = torch.randint(-most, most + 1, (elements,), generator=generator)
        new.view(INTEGER[itemsize])[chosen] += steps[chosen].to(INTEGER[itemsize])
    return new, old


def test_same_is_no_bytes(each):
    piece = integers([5, -6, 7], 2)
    assert encoded(piece, piece.clone(), 2) == (SAME, b"", 0)
    assert encoded(piece[:0], piece[:0].clone(), 8) == (SAME, b"", 0)


def test_full_is_the_new_piece(each):
    assert encoded(integers([1000, 2000], 2), integers([0, 0], 2), 2) == (FULL, bytes.fromhex("e803d007"), 2)


def test_list_is_indices_then_elements(each):
    old, new = [0] * 70000, [0] * 70000
    new[69998] = 1  # one token would have six bytes too, and of equals the lowest number is taken
    assert encoded(integers(new, 2), integers(old, 2), 2) == (LIST, bytes.fromhex("6e110100 0100"), 1)
    new[5] = 0x7766
    target, changed = applied(integers(old, 2), bytes.fromhex("05000000 6e110100 6677 0100"), LIST, 2)
    assert changed == 2 and torch.equal(target, integers(new, 2))


def test_bitmap_is_a_bit_an_element_then_the_changed_ones(each):
    old, new = [0] * 12, [0, 300, 400, 500, 0, 0, 600, 0, 700, 800, 0, 900]
    expected = bytes.fromhex("4e0b") + bytes(integers([300, 400, 500, 600, 700, 800, 900], 2).numpy())
    assert encoded(integers(new, 2), integers(old, 2), 2) == (BITMAP, expected, 7)


STEP_TOKENS = [
    # unchanged elements before it, change, bytes
    (0, +1, "00"),
    (0, -1, "01"),
    (111, +1, "de"),
    (111, -1, "df"),
    (112, +1, "e000"),
    (112, -1, "e100"),
    (367, -1, "e1ff"),
    (368, +1, "e200"),
    (3695, -1, "fbff"),
    (3696, -1, "fe700e0000ff"),
    (0, +2, "fc0002"),
    (255, -128, "fcff80"),
    (255, +127, "fcff7f"),
    (256, +2, "fe0001000002"),
    (0, +128, "fd008000"),
    (3, -129, "fd037fff"),
    (256, +0x1234, "ff000100003412"),
]
"""One token each, of elements of two bytes that were 0."""


def test_every_kind_of_token_has_the_bytes_that_the_docs_say(each):
    for repeat in (1, 40):  # alone, and as many as go through the fast loops
        elements, payload = [], ""
        for gap, step, token in STEP_TOKENS * repeat:
            elements += [0] * gap + [step]
            payload += token
        elements += [0] * 5000
        old, new = integers([0] * len(elements), 2), integers(elements, 2)
        assert encoded(new, old, 2) == (STEPS, bytes.fromhex(payload), len(STEP_TOKENS) * repeat)
        assert torch.equal(applied(old, bytes.fromhex(payload), STEPS, 2)[0], new)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_a_step_wraps_around(each, itemsize):
    most = 2 ** (8 * itemsize - 1) - 1
    old, new = [most, 0, -1, -most - 1] + [9] * 60, [-most - 1, -1, 0, most] + [9] * 60
    got = encoded(integers(new, itemsize), integers(old, itemsize), itemsize)
    assert got == (STEPS, bytes.fromhex("00010001"), 4)
    assert torch.equal(applied(integers(old, itemsize), got[1], STEPS, itemsize)[0], integers(new, itemsize))


def test_floats_are_bits(each):
    old = torch.tensor([0.0, float("nan"), 1.0, 2.0], dtype=torch.bfloat16).view(torch.uint8)
    new = torch.tensor([-0.0, float("nan"), 1.0, 2.0], dtype=torch.bfloat16).view(torch.uint8)
    encoding, payload, changed = encoded(new, old, 2)
    assert changed == 1 and torch.equal(applied(old, payload, encoding, 2)[0], new)


def test_all_implementations_make_the_same_bytes_and_take_them_back(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    chosen = [implementation(name) for name in IMPLEMENTATIONS]
    encodings = set()
    for round_ in range(240):
        itemsize = (1, 2, 4, 8)[round_ % 4]
        most = (8, 70, 700, 6000)[round_ // 4 % 4]
        elements = int(torch.randint(1, most, (1,), generator=generator))
        density = (0, 0.001, 0.05, 0.5, 1)[round_ % 5]
        new, old = pair(elements, itemsize, density, ("ones", "steps", "bits")[round_ % 3], generator)
        results = []
        for each_ in chosen:
            monkeypatch.setattr(delta, "_chosen", each_)
            encoding, payload, changed = encoded(new, old, itemsize)
            results.append((encoding, payload, changed))
            got, count = applied(old, payload, encoding, itemsize)
            assert torch.equal(got, new) and count == changed
            assert len(payload) <= old.numel()
        assert all(result == results[0] for result in results), (round_, itemsize, elements, density)
        assert results[0][2] == int((new.view(-1, itemsize) != old.view(-1, itemsize)).any(1).sum())
        encodings.add(results[0][0])
    assert encodings == {SAME, FULL, LIST, BITMAP, STEPS}


def test_pieces_need_no_alignment(each):
    generator = torch.Generator().manual_seed(1)
    new, old = pair(500, 8, 0.05, "steps", generator)
    rooms = [torch.cat([torch.zeros(offset, dtype=torch.uint8), piece]) for offset, piece in ((1, new), (3, old))]
    out = torch.zeros(delta.bound(4000) + 5, dtype=torch.uint8)
    encoding, size, changed = delta.encode(rooms[0][1:], rooms[1][3:], 8, out[5:])
    assert torch.equal(rooms[1][3:], new)
    room = torch.cat([torch.zeros(7, dtype=torch.uint8), old])
    assert delta.apply(room[7:], out[5 : 5 + size], encoding, 8) == changed and torch.equal(room[7:], new)


def test_300_steps_of_a_random_walk_arrive(each):
    generator = torch.Generator().manual_seed(2)
    master = torch.randn(3001, generator=generator) * 0.02
    sender = master.bfloat16().view(torch.uint8).clone()
    receiver = sender.clone()
    out = torch.zeros(delta.bound(sender.numel()), dtype=torch.uint8)
    total = 0
    for _ in range(300):
        master += torch.randn(3001, generator=generator) * 1e-6
        new = master.bfloat16().view(torch.uint8)
        encoding, size, changed = delta.encode(new, sender, 2, out)
        assert delta.apply(receiver, out[:size], encoding, 2) == changed
        assert torch.equal(receiver, new)
        total += size
    assert 0 < total / (300 * sender.numel()) < 0.05


MALFORMED = [
    (2, 4, SAME, "00", "wrong size at byte 1"),
    (2, 4, FULL, "00" * 7, "wrong size"),
    (2, 4, FULL, "00" * 9, "wrong size"),
    (2, 4, LIST, "00000000 ff", "wrong size"),
    (2, 4, LIST, "04000000 ffff", "out of range at byte 0"),
    (2, 4, LIST, "ffffffff ffff", "out of range"),
    (2, 4, LIST, "01000000 01000000 ffff ffff", "not ascending at byte 4"),
    (2, 4, LIST, "01000000 00000000 ffff ffff", "not ascending at byte 4"),
    (2, 4, BITMAP, "", "wrong size"),
    (2, 4, BITMAP, "03 ffff", "wrong size"),
    (2, 4, BITMAP, "03 ffff ffff ff", "wrong size"),
    (2, 4, BITMAP, "11 ffff ffff", "padding"),
    (2, 4, STEPS, "08", "out of range at byte 0"),
    (2, 4, STEPS, "06 00", "out of range at byte 1"),
    (2, 4, STEPS, "e0 00", "out of range at byte 0"),
    (2, 4, STEPS, "00 fd 03 ffff", "out of range at byte 1"),
    (2, 4, STEPS, "fe ffffffff 01", "out of range"),
    (2, 4, STEPS, "ff ffffffff 0101", "out of range"),
    (2, 4, STEPS, "00 e0", "truncated token at byte 1"),
    (2, 4, STEPS, "fc", "truncated"),
    (2, 4, STEPS, "fc 00", "truncated"),
    (2, 4, STEPS, "fd 00 ff", "truncated"),
    (2, 4, STEPS, "fe 00000000", "truncated"),
    (8, 1, STEPS, "ff 00000000 00000000000000", "truncated"),
    (2, 0, STEPS, "00", "out of range"),
]


@pytest.mark.parametrize(("itemsize", "elements", "encoding", "payload", "reason"), MALFORMED)
def test_a_malformed_payload_is_refused_with_the_reason(each, itemsize, elements, encoding, payload, reason):
    with pytest.raises(ValueError, match=f"malformed weight delta.*{reason}"):
        applied(torch.zeros(itemsize * elements, dtype=torch.uint8), bytes.fromhex(payload), encoding, itemsize)


@pytest.mark.parametrize("encoding", [-1, 5, 1 << 64])
def test_an_unknown_encoding_is_refused(each, encoding):
    with pytest.raises(ValueError, match="is none of 0 to 4"):
        applied(torch.zeros(8, dtype=torch.uint8), b"", encoding, 2)


def test_no_payload_writes_outside_and_all_implementations_agree_on_it(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    chosen = [implementation(name) for name in IMPLEMENTATIONS]
    outcomes = {"taken": 0, "refused": 0}
    for round_ in range(800):
        itemsize, elements = (1, 2, 4, 8)[round_ % 4], int(torch.randint(0, 300, (1,), generator=generator))
        new, old = pair(elements, itemsize, 0.2, ("ones", "steps", "bits")[round_ % 3], generator)
        monkeypatch.setattr(delta, "_chosen", chosen[0])
        encoding, payload, _ = encoded(new, old, itemsize)
        payload = bytearray(payload)
        if round_ % 2:
            encoding = round_ // 2 % 5
            payload = bytearray(torch.randint(0, 256, (round_ % 97,), generator=generator).tolist())
            if round_ % 3 == 0:
                payload = bytearray(byte | 0xE0 if byte & 1 else byte & 3 for byte in payload)
        for place, value in zip(*torch.randint(0, 1 << 16, (2, round_ % 4), generator=generator).tolist(), strict=True):
            if payload:
                payload[place % len(payload)] = value % 256
        if round_ % 8 == 0:
            del payload[-1:]
        results = []
        for each_ in chosen:
            monkeypatch.setattr(delta, "_chosen", each_)
            try:
                target, count = applied(old, payload, encoding, itemsize)
                results.append((bytes(target.numpy()), count))
            except ValueError as error:
                results.append(str(error))
        assert all(result == results[0] for result in results), (round_, results)
        outcomes["refused" if isinstance(results[0], str) else "taken"] += 1
    assert min(outcomes.values()) > 100, outcomes


def test_tensors_that_c_must_not_touch_are_refused(each):
    piece, out = torch.zeros(64, dtype=torch.uint8), torch.zeros(delta.bound(64), dtype=torch.uint8)
    for new, old, itemsize, room in [
        (piece.view(torch.int16), piece, 2, out),
        (torch.zeros(128, dtype=torch.uint8)[::2], piece, 2, out),
        (piece, piece[:32].clone(), 2, out),
        (piece, piece.clone(), 3, out),
        (piece[:63], piece[:63].clone(), 2, out),
        (piece, piece.clone(), 2, out[:-1]),
        (torch.zeros(64, dtype=torch.uint8, device="meta"), piece, 2, out),
    ]:
        with pytest.raises(ValueError, match="delta codec takes|are not elements|encode got"):
            delta.encode(new, old, itemsize, room)
    with pytest.raises(ValueError, match="are not elements"):
        delta.apply(piece[:7], piece[:7], FULL, 2)
    with pytest.raises(ValueError, match="delta codec takes"):
        delta.apply(piece, torch.zeros(64), FULL, 2)


def test_many_threads_may_encode_at_once(each):
    generator = torch.Generator().manual_seed(4)
    pairs = [pair(3000, 2, 0.05, "steps", generator) for _ in range(4)]
    alone = [encoded(new, old, 2) for new, old in pairs]
    together: list = [None] * len(pairs)

    def work(i):
        together[i] = [encoded(*pairs[i], 2) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,), name=f"verl_fl-test-{i}") for i in range(len(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [[result] * 20 for result in alone]


def test_without_a_compiler_torch_is_used_and_said_once(monkeypatch, caplog):
    monkeypatch.setattr(delta, "_chosen", None)
    monkeypatch.setenv("CC", "no-such-compiler")
    piece, out = torch.zeros(64, dtype=torch.uint8), torch.zeros(delta.bound(64), dtype=torch.uint8)
    with caplog.at_level(logging.WARNING, "verl_fl.weight_sync"):
        for _ in range(3):
            assert delta.encode(piece + 1, piece.clone(), 2, out) == (FULL, 64, 32)
    assert caplog.text.count("no C compiler") == 1
    assert delta.kernel().startswith("torch: no C compiler")
    with pytest.raises(Unavailable):
        delta._load()


def test_the_c_kernel_is_used_where_there_is_a_compiler(monkeypatch):
    monkeypatch.setattr(delta, "_chosen", None)
    assert delta.kernel().startswith("C: ")
