"""Devices, memory, random numbers, copies, streams: what torch does on the chip."""

from __future__ import annotations

import contextlib
import io
import time

import torch

from verl_fl.platform.base import Platform
from verl_fl.testing.conformance._check import Failed, Skip, check, expect

_MB = 1 << 20
_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float8_e4m3fn")


def _need_accelerator(platform: Platform) -> None:
    if platform.device_name == "cpu":
        raise Skip("the host is the device")


@check("with several workers a node, work would go to a device that another one has", group="devices")
def device_selection(platform: Platform) -> None:
    count = platform.device_count()
    expect(platform.is_available() and count >= 1, "no device can be used here", found=f"device_count()={count}")
    if platform.device_name == "cpu":
        platform.set_device(0)
        return
    try:
        for index in range(count):
            platform.set_device(index)
            found = platform.current_device()
            expect(found == index, f"after set_device({index}) the current device is {found}")
            on = torch.ones(1, device=platform.device_name).device.index
            expect(on == index, f"after set_device({index}) a new tensor is on device {on}")
    finally:
        platform.set_device(0)


@check("a run would go on with a wrong device, or with half its tensors elsewhere", group="devices")
def errors(platform: Platform) -> None:
    count = platform.device_count()
    with contextlib.suppress(RuntimeError, ValueError, AssertionError, IndexError):
        platform.set_device(count + 7)
        platform.set_device(0)
        raise Failed(f"set_device({count + 7}) is taken where there are {count} devices; it has to raise")
    if platform.device_name != "cpu":
        try:
            torch.maximum(torch.ones(2).to(platform.current_device()), torch.ones(2))
        except RuntimeError as error:
            named = platform.device_name in str(error)
            expect(named, "the error for tensors of two devices does not name the device", found=str(error)[:200])
        else:
            raise Failed("an operator takes a tensor of the device and one of the host; it has to raise")


@check(
    "verl's memory report, its offload decisions and the native rollout's cache size are built on them", group="memory"
)
def memory_figures(platform: Platform) -> None:
    module, device = platform.device_module, platform.current_device()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    block = torch.ones(64 * _MB // 4).to(device)
    held = module.memory_allocated() - before
    expect(held > 50 * _MB, "memory_allocated() does not grow with a tensor of 64 MiB", found=f"{held} B more")
    del block
    after = module.memory_allocated() - before
    expect(after < 16 * _MB, "memory_allocated() does not shrink when the tensor is gone", found=f"{after} B more")
    peak = module.max_memory_allocated() - before
    expect(peak > 50 * _MB, "max_memory_allocated() has forgotten a tensor of 64 MiB", found=f"{peak} B more")
    free, total = module.mem_get_info()
    expect(0 < free <= total, "mem_get_info() is no (free, total)", found=(free, total))
    platform.empty_cache()


@check("verl shows it; without the right error a run that lacks memory ends in a crash nobody can read", group="memory")
def out_of_memory(platform: Platform) -> None:
    _need_accelerator(platform)
    device = platform.current_device()
    total = platform.device_module.get_device_properties(device).total_memory
    try:
        torch.empty(total + 64 * _MB, dtype=torch.uint8, device=platform.device_name)
    except torch.OutOfMemoryError:
        pass
    except Exception as error:
        raise Failed(
            f"a tensor beyond the device's memory raises {type(error).__name__}, not OutOfMemoryError"
        ) from error
    else:
        raise Failed("a tensor larger than the device's memory can be made; get_device_properties() tells too little")
    usable = torch.ones(4).to(device).sum().item() == 4.0
    expect(usable, "the device computes wrong numbers after an out-of-memory error")


@check(
    "a run could not be repeated, and dropout would differ between the ranks of a tensor-parallel group", group="random"
)
def rng_seed(platform: Platform) -> None:
    device = platform.current_device()
    host = torch.get_rng_state()
    platform.manual_seed(1234)
    first = torch.rand(8, device=device)
    platform.manual_seed(1234)
    expect(torch.equal(first.cpu(), torch.rand(8, device=device).cpu()), "manual_seed() does not repeat the numbers")
    if platform.device_name != "cpu":
        expect(torch.equal(host, torch.get_rng_state()), "manual_seed() changes the host's generator")


@check("with several devices in one process, all but one would draw other numbers after a restart", group="random")
def rng_seed_all(platform: Platform) -> None:
    count = platform.device_count()
    names = ["cpu"] if platform.device_name == "cpu" else [f"{platform.device_name}:{index}" for index in range(count)]
    platform.manual_seed_all(77)
    first = [torch.rand(4, device=name).cpu() for name in names]
    platform.manual_seed_all(77)
    again = [torch.rand(4, device=name).cpu() for name in names]
    wrong = [name for name, a, b in zip(names, first, again, strict=True) if not torch.equal(a, b)]
    expect(not wrong, "manual_seed_all() does not repeat the numbers", found=f"wrong on {', '.join(wrong)}")


@check("a resumed run would draw other numbers than one that went on", group="random")
def rng_state(platform: Platform) -> None:
    module, device = platform.device_module, platform.current_device()
    torch.rand(3, device=device)
    state = module.get_rng_state()
    first = torch.rand(8, device=device)
    module.set_rng_state(state)
    same = torch.equal(first.cpu(), torch.rand(8, device=device).cpu())
    expect(same, "set_rng_state() does not bring get_rng_state()'s numbers back")


@check("weights would change on their way to the device, or back into a checkpoint", group="copies")
def copies(platform: Platform) -> None:
    device = platform.current_device()
    bits = torch.randint(0, 255, (6, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    for name in _DTYPES:
        dtype = getattr(torch, name, None)
        if dtype is None or not _holds(platform, dtype):  # which dtypes it has to hold is asked by another check
            continue
        tensor = bits.bool() if dtype is torch.bool else bits.view(-1).view(dtype)
        for kind, source in (("whole", tensor), ("strided", tensor.view(2, -1)[:, ::2]), ("empty", tensor[:0])):
            back = source.to(device).cpu()
            same = torch.equal(_bits(back), _bits(source)) and back.dtype == dtype
            expect(same, f"a {kind} {name} tensor comes back from the device with other bits")
    scalar = torch.tensor(3.5).to(device)
    expect(scalar.item() == 3.5 and scalar.dim() == 0, "a scalar comes back changed", found=scalar.item())


def _holds(platform: Platform, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point and dtype is not torch.float32:
        try:
            torch.empty(1, dtype=dtype, device=platform.device_name)
        except (RuntimeError, TypeError):
            return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


@check("weight sync would send a buffer before its copy has arrived", group="streams")
def pinned_copy(platform: Platform) -> None:
    _need_accelerator(platform)
    if not (supported := platform.supports("pinned_memory"))[0]:
        raise Skip(supported[1])
    source = torch.arange(float(_MB)).to(platform.current_device())
    target = torch.zeros(_MB).pin_memory()
    expect(target.is_pinned(), "pin_memory() returns memory that is not pinned")
    stream, event = platform.new_stream(), platform.new_event()
    stream.wait_stream(platform.current_stream())
    with platform.device_module.stream(stream):
        target.copy_(source, non_blocking=True)
        event.record(stream)
    event.synchronize()
    arrived = torch.equal(target, torch.arange(float(_MB)))
    stream.synchronize()
    expect(arrived, "after event.synchronize() a copy to pinned memory has not arrived")


@check("copies of weight sync and FSDP's gathering run beside computing, and must be waited for", group="streams")
def streams(platform: Platform) -> None:
    _need_accelerator(platform)
    if not (supported := platform.supports("streams"))[0]:
        raise Skip(supported[1])
    stream, home = platform.new_stream(), platform.current_stream()
    tensor = torch.ones(_MB).to(platform.current_device())
    stream.wait_stream(home)
    with platform.stream(stream):
        expect(platform.current_stream() == stream, "inside stream(s) the current stream is not s")
        tensor.mul_(3)
        done = stream.record_event()
    expect(platform.current_stream() == home, "after stream(s) the current stream is not the one from before")
    home.wait_event(done)
    expect(tensor.add(1).cpu().eq(4).all(), "work that waited for a stream's event has read what was there before it")
    stream.synchronize()
    expect(stream.query() and done.query(), "query() of finished work is not True")


@check("verl times its steps, and reads results of a step, after it", group="streams")
def synchronize(platform: Platform) -> None:
    _need_accelerator(platform)
    if not platform.supports("pinned_memory")[0] or not platform.supports("streams")[0]:
        raise Skip("there is no asynchronous copy to wait for")
    source, target = torch.full((_MB,), 2.0).to(platform.current_device()), torch.zeros(_MB).pin_memory()
    stream = platform.new_stream()
    stream.wait_stream(platform.current_stream())
    for _ in range(3):
        with platform.device_module.stream(stream):
            target.copy_(source, non_blocking=True)
        platform.synchronize()
        arrived = bool(target.eq(2).all())
        stream.synchronize()
        expect(arrived, "after synchronize() a copy of another stream has not arrived")
        target.zero_()


@check("training in a dtype that the chip lacks fails late, or not at all and wrongly", group="dtypes")
def dtypes(platform: Platform) -> None:
    device = platform.current_device()
    left, right = (torch.randn(32, 48, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    for feature, dtype, tolerance in (("bf16", torch.bfloat16, 0.5), ("fp16", torch.float16, 0.1)):
        if not platform.supports(feature)[0]:
            continue
        try:
            product = (left.to(device, dtype) @ right.to(device, dtype).T).float().cpu()
        except Exception as error:
            raise Failed(
                f"supports({feature!r}) is True, and a product raises {type(error).__name__}: {error}"
            ) from error
        worst = (product - left @ right.T).abs().max().item()
        expect(worst < tolerance, f"a {feature} product is far from the fp32 one", found=f"off by {worst:.3f}")


@check("a checkpoint could not be read back, on this machine or on one without the chip", group="checkpoints")
def checkpoint(platform: Platform) -> None:
    device, file = platform.current_device(), io.BytesIO()
    weight = torch.randn(17, 5, generator=torch.Generator().manual_seed(3))
    torch.save({"weight": weight.to(device), "rng": platform.device_module.get_rng_state()}, file)
    for where in ("cpu", platform.device_name):
        file.seek(0)
        state = torch.load(file, map_location=where, weights_only=True)
        expect(torch.equal(state["weight"].cpu(), weight), f"torch.load(map_location={where!r}) changes the weights")
        expect(state["weight"].device.type == where, f"torch.load(map_location={where!r}) puts them elsewhere")
    platform.device_module.set_rng_state(state["rng"].cpu())


@check("every one of verl's call sites pays it, thousands of times a step", group="devices")
def call_cost(platform: Platform) -> None:
    module = platform.device_module

    def per_call(function: object) -> float:
        assert callable(function)
        best = float("inf")
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(2000):
                function()
            best = min(best, (time.perf_counter() - start) / 2000)
        return best

    for name in ("current_device", "device_count", "is_available"):
        extra = per_call(getattr(platform, name)) - per_call(getattr(module, name))
        expect(extra < 5e-6, f"{name}() costs much more than torch's own", found=f"{extra * 1e6:.1f} microseconds more")
