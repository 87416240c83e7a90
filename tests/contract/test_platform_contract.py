"""The same questions to every platform that can be asked on this machine."""

import contextlib
import os
import socket

import pytest
import torch

from verl_fl.platform.base import Platform
from verl_fl.platform.bridge import to_verl
from verl_fl.platform.manager import platform_classes

SIXTEEN = [
    "is_available",
    "current_device",
    "device_count",
    "set_device",
    "synchronize",
    "manual_seed",
    "manual_seed_all",
    "set_allocator_settings",
    "empty_cache",
    "get_device_capability",
    "communication_backend_name",
    "visible_devices_envvar",
    "nvtx_range",
    "profiler_start",
    "profiler_stop",
    "cudart",
]


@pytest.fixture(params=["cpu"])  # test_conformance.py asks simulated vendors more, test_vendor_files.py the others
def platform(request):
    from verl.plugin.platform import PlatformBase

    return to_verl(platform_classes()[request.param], PlatformBase)()


def test_it_has_the_sixteen_methods(platform):
    assert len(SIXTEEN) == 16
    assert all(callable(getattr(platform, name)) for name in SIXTEEN)


def test_it_is_one_of_verls(platform):
    from verl.plugin.platform import PlatformBase

    assert isinstance(platform, PlatformBase) and isinstance(platform, Platform)


def test_its_names_are_words(platform):
    assert platform.device_name.isalnum() and platform.vendor_name.isalnum()
    assert platform.ray_resource_name() != "CPU"


def test_a_tensor_goes_to_its_current_device(platform):
    assert torch.ones(2).to(platform.current_device()).device.type == platform.device_name
    assert platform.is_available() and platform.device_count() >= 1


def test_seeding_repeats_the_random_numbers(platform):
    platform.manual_seed(3)
    first = torch.rand(4, device=platform.device_name)
    platform.manual_seed_all(3)
    assert torch.equal(first, torch.rand(4, device=platform.device_name))


def test_the_rng_state_round_trips(platform):
    state = platform.device_module.get_rng_state()
    first = torch.rand(4, device=platform.device_name)
    platform.device_module.set_rng_state(state)
    assert torch.equal(first, torch.rand(4, device=platform.device_name))


def test_memory_figures_follow_an_allocation(platform):
    module = platform.device_module
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    block = torch.ones(32 << 20, device=platform.device_name)
    assert module.memory_allocated() - before > 100 << 20
    assert module.max_memory_allocated() >= module.memory_allocated() - (1 << 20)
    available, total = module.mem_get_info()
    assert 0 < available <= total
    del block
    platform.empty_cache()


def test_streams_and_events_exist(platform):
    stream, event = platform.new_stream(), platform.new_event()
    with platform.stream(stream):
        torch.ones(1, device=platform.device_name)
        event.record()
    event.synchronize()
    stream.wait_stream(platform.current_stream())
    stream.synchronize()
    assert event.query()


def test_profiling_is_harmless(platform):
    with platform.nvtx_range("block"):
        platform.profiler_start()
        platform.profiler_stop()
    platform.set_allocator_settings("expandable_segments:True")


def test_features_are_answered_with_a_reason(platform):
    for feature in ("bf16", "fp16", "flash_attention_2", "ipc", "pinned_memory", "fsdp1"):
        supported, reason = platform.supports(feature)
        assert isinstance(supported, bool) and reason
    with pytest.raises(ValueError, match="unknown feature 'warp'"):
        platform.supports("warp")


def test_the_device_uuid_is_stable_and_respects_the_mask(platform, monkeypatch):
    monkeypatch.delenv(platform.visible_devices_envvar(), raising=False)
    assert platform.get_device_uuid(0) == platform.get_device_uuid(0)
    monkeypatch.setenv(platform.visible_devices_envvar(), "7, 8")
    assert platform.get_device_uuid(1).endswith("8")


def test_the_backend_string_names_each_device_once(platform):
    devices = [part.split(":")[0] for part in platform.process_group_backend().split(",")]
    assert len(devices) == len(set(devices)) and "cpu" in devices


def _broadcast(rank, world_size, port, ray_variant):
    import torch.distributed as dist
    from verl.utils import distributed

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), VERL_PLATFORM="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if ray_variant:
        distributed.initialize_global_process_group_ray()
    else:
        assert distributed.initialize_global_process_group() == (rank, rank, world_size)
    tensor = torch.tensor([1, 2, 3]) if rank == 0 else torch.zeros(3, dtype=torch.int64)
    dist.broadcast(tensor, 0)
    assert tensor.tolist() == [1, 2, 3]
    assert dist.get_backend_config() == "cpu:gloo", dist.get_backend_config()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


@pytest.mark.parametrize("ray_variant", [True, False], ids=["ray", "torchrun"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_both_of_verls_initialisers_make_a_group_that_broadcasts(world_size, ray_variant):
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_broadcast, (world_size, port, ray_variant), nprocs=world_size)


def test_freed_memory_is_kept_and_given_back_when_it_becomes_scarce(monkeypatch):
    from verl_fl.platform import cpu

    assert cpu.keep_freed_memory() is True
    module = cpu.CPUDeviceModule()
    block = torch.ones(64 << 20)
    del block
    held = module.memory_allocated()
    module.empty_cache()
    assert module.memory_allocated() > held - (100 << 20), "nothing is given back while there is enough"
    monkeypatch.setattr(module, "mem_get_info", lambda: (1, 100))
    module.empty_cache()
    assert module.memory_allocated() < held - (200 << 20)
