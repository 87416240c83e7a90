"""The simulated chip is a stranger, with limits, streams and collectives of its own. Each body runs where it is."""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from verl_fl.testing.simulated import Chip, install

SMALL = 64 << 20


def _become_simx():
    install(Chip(name="simx", vendor="acme", device_count=2, memory_bytes=SMALL))


@pytest.fixture(scope="module")
def simx():
    """Runs a function of this module in a process that has the chip, and raises what it raises."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_become_simx) as pool:
        yield lambda body: pool.submit(body).result(timeout=240)


def numbers_agree_with_the_cpus():
    left, right = torch.arange(6.0).reshape(2, 3), torch.randn(3, 4)
    on_device = left.to("simx") @ right.to("simx")
    assert on_device.device == torch.device("simx", 0)
    assert torch.equal(on_device.cpu(), left @ right)
    assert torch.equal(left.to("simx").t().contiguous().cpu(), left.t().contiguous())
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    inputs = torch.randn(2, 5, 16)
    layer(inputs).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    layer.to("simx")(inputs.to("simx")).square().mean().backward()
    for parameter, grad in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), grad)


def memory_has_a_limit_and_comes_back():
    free, total = torch.simx.mem_get_info()
    assert total == SMALL
    block = torch.empty(SMALL // 8, device="simx")
    assert torch.simx.memory_allocated() >= SMALL // 2
    with pytest.raises(torch.OutOfMemoryError, match="simx:0 out of memory. Tried to allocate 48 MiB"):
        torch.empty(48 << 20, dtype=torch.uint8, device="simx")
    del block
    assert torch.simx.mem_get_info()[0] == free
    assert torch.simx.max_memory_allocated() >= SMALL // 2
    torch.simx.reset_peak_memory_stats()
    assert torch.simx.max_memory_allocated() == torch.simx.memory_allocated()


def tensors_of_two_devices_do_not_mix():
    ours = torch.ones(3, device="simx")
    with pytest.raises(RuntimeError, match="same device.*simx:0 and cpu"):
        torch.maximum(ours, torch.ones(3))
    with pytest.raises(RuntimeError, match="same device.*simx:0 and simx:1"):
        torch.maximum(ours, torch.ones(3, device="simx:1"))
    with pytest.raises(RuntimeError, match="invalid device ordinal 2: this process sees 2 simx"):
        torch.simx.set_device(2)
    assert (ours * 2)[torch.tensor([0, 2])].tolist() == [2.0, 2.0], "indices may come from the host"
    assert ours.to("simx:1").device.index == 1


def random_numbers_are_the_devices_own():
    torch.simx.manual_seed(3)
    first = torch.rand(4, device="simx")
    host = torch.get_rng_state()
    torch.simx.manual_seed_all(3)
    torch.rand(1)
    torch.set_rng_state(host)
    assert torch.equal(first, torch.rand(4, device="simx"))
    assert torch.equal(host, torch.get_rng_state())
    generator = torch.Generator(device="simx").manual_seed(3)
    assert torch.equal(first, torch.rand(4, device="simx", generator=generator))


def a_side_stream_runs_later_than_its_caller():
    module = torch.simx
    module.set_copy_engine(bytes_per_s=0, lag_s=0.05)
    try:
        source, target = torch.full((4,), 7.0, device="simx"), torch.zeros(4).pin_memory()
        module.synchronize()
        stream, event = module.Stream(), module.Event()
        with module.stream(stream):
            assert module.current_stream() == stream
            target.copy_(source, non_blocking=True)
            event.record()
        assert target.tolist() == [0.0] * 4 and not event.query() and not stream.query()
        with pytest.raises(RuntimeError, match="strict: the host reads memory that stream"):
            module.check_host(target)
        with module.watch_host():
            torch.ones(2).add_(1)
            with pytest.raises(RuntimeError, match="strict: the host reads"):
                target + 1
        event.synchronize()
        with module.watch_host():
            target + 1
        assert target.tolist() == [7.0] * 4 and event.query()
        module.check_host(target)
        pageable = torch.zeros(4)
        with module.stream(stream):
            pageable.copy_(source, non_blocking=True)
        assert pageable.tolist() == [7.0] * 4, "only pinned memory can be copied behind its owner's back"
    finally:
        module.set_copy_engine(bytes_per_s=0, lag_s=0.002)


def an_unordered_use_is_refused_even_when_it_would_have_gone_well():
    module = torch.simx
    stream, tensor = module.Stream(), torch.zeros(4, device="simx")
    with module.stream(stream), pytest.raises(RuntimeError, match="strict: stream .* reads a tensor that stream 0"):
        tensor + 1
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        tensor.fill_(2.0)
    time.sleep(0.05)  # long done, but nobody has waited for it
    with pytest.raises(RuntimeError, match="may still be writing"):
        tensor.sum()
    module.current_stream().wait_stream(stream)
    assert tensor.sum().item() == 8.0
    module.set_strict(False)
    try:
        with module.stream(stream):
            tensor.add_(1)
        assert tensor.sum().item() in (8.0, 12.0)
    finally:
        module.set_strict(True)
        module.synchronize()


def a_copy_engine_has_a_speed_and_a_trace():
    module = torch.simx
    source, target = torch.empty(1 << 20, dtype=torch.uint8, device="simx"), torch.empty(1 << 20, dtype=torch.uint8)
    target = target.pin_memory()
    module.synchronize()
    module.set_copy_engine(bytes_per_s=20e6)
    try:
        module.take_trace()
        streams = [module.Stream(), module.Stream()]
        start = time.monotonic()
        for stream in streams:
            with module.stream(stream):
                target.copy_(source, non_blocking=True)
        module.synchronize()
        assert time.monotonic() - start > 0.1, "two copies of 1 MiB at 20 MB/s take turns"
        spans = module.take_trace()
        assert [(engine, size) for _, _, engine, size, _, _ in spans] == [("to_host", 1 << 20)] * 2
        assert spans[1][4] >= spans[0][5], "one engine a direction"
    finally:
        module.set_copy_engine(bytes_per_s=0, lag_s=0.002)


def state_survives_a_file(folder="/tmp"):
    path = f"{folder}/verl-fl-simulated-{os.getpid()}.pt"
    try:
        torch.save({"weight": torch.arange(4.0, device="simx")}, path)
        assert torch.load(path)["weight"].device.type == "simx"
        assert torch.load(path, map_location="cpu")["weight"].tolist() == [0.0, 1.0, 2.0, 3.0]
    finally:
        os.unlink(path)


def a_second_chip_is_refused():
    with pytest.raises(RuntimeError, match="one foreign device type a process, and here it is 'simx'"):
        install(Chip(name="simy", vendor="zenith"))


BODIES = [
    numbers_agree_with_the_cpus,
    memory_has_a_limit_and_comes_back,
    tensors_of_two_devices_do_not_mix,
    random_numbers_are_the_devices_own,
    a_side_stream_runs_later_than_its_caller,
    an_unordered_use_is_refused_even_when_it_would_have_gone_well,
    a_copy_engine_has_a_speed_and_a_trace,
    state_survives_a_file,
    a_second_chip_is_refused,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_the_chip(simx, body):
    simx(body)


@pytest.mark.parametrize(
    ("mask", "names"),
    [(None, "0 1 2"), ("", ""), ("2,0", "2 0"), ("1,9", "1"), ("x,1", "1")],
    ids=["none", "empty", "reordered", "unknown-id", "letters"],
)
def test_the_mask_is_read_at_import(mask, names):
    code = (
        "import os, torch\n"
        "from verl_fl.testing.simulated import Chip, install\n"
        "m = install(Chip(name='simx', vendor='acme', device_count=3))\n"
        "os.environ['SIMX_VISIBLE_DEVICES'] = '1'\n"
        "print(*(m.get_device_name(i).split()[-1] for i in range(m.device_count())), m.is_available())"
    )
    env = {key: value for key, value in os.environ.items() if key != "SIMX_VISIBLE_DEVICES"}
    env |= {} if mask is None else {"SIMX_VISIBLE_DEVICES": mask}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.split() == [*names.split(), str(bool(names))]


def _collectives(rank, port):
    import torch.distributed as dist

    install(Chip(name="simx", vendor="acme", bf16=False))
    torch.simx.set_device(rank)
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("cpu:gloo,simx:simxccl", init_method=store, rank=rank, world_size=2)
    ours, host = torch.tensor([1.0, 2.0], device="simx") * (rank + 1), torch.ones(2)
    dist.all_reduce(ours)
    dist.all_reduce(host)
    assert (ours.tolist(), host.tolist()) == ([3.0, 6.0], [2.0, 2.0])
    group = dist.new_group(backend="simxccl")
    with pytest.raises(RuntimeError, match=r"no backend for cpu|No backend type associated with device type cpu"):
        dist.all_reduce(host, group=group)
    with pytest.raises(RuntimeError, match="simx has no bfloat16"):
        ours.to(torch.bfloat16)
    dist.destroy_process_group()


def test_its_collectives_take_its_tensors_only():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_collectives, (port,), nprocs=2)
