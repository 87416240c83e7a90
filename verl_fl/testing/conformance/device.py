"""Devices, memory, random numbers, copies, dtypes: what torch does on the chip."""

from __future__ import annotations

import contextlib
import io
import time

import torch

from verl_fl._errors import explain
from verl_fl.platform.base import Platform
from verl_fl.testing.conformance._check import Failed, Skip, check, expect

_MB = 1 << 20
_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float8_e4m3fn")


def need_accelerator(platform: Platform) -> None:
    """Skip the check where the device is the host."""
    if platform.device_name == "cpu":
        raise Skip("the host is the device")


@check("with several workers a node, work would go to a device that another one has", group="devices")
def device_selection(platform: Platform) -> None:
    count = platform.device_count()
    usable, found = platform.is_available(), f"is_available()={platform.is_available()}, device_count()={count}"
    expect(usable and count >= 1, "no device can be used here", found=found, fix="let the mask show one")
    if platform.device_name == "cpu":
        platform.set_device(0)
        return
    try:
        for index in range(count):
            platform.set_device(index)
            current, on = platform.current_device(), torch.ones(1, device=platform.device_name).device.index
            fix = "set_device() and current_device() are the device module's own; drop an override"
            expect(current == index, f"after set_device({index}) the current device is {current}", legal=index, fix=fix)
            expect(on == index, f"after set_device({index}) a new tensor is on device {on}", legal=index, fix=fix)
    finally:
        platform.set_device(0)


@check("a run would go on with a wrong device, or with half its tensors elsewhere", group="devices")
def errors(platform: Platform) -> None:
    count = platform.device_count()
    with contextlib.suppress(RuntimeError, ValueError, AssertionError, IndexError):
        platform.set_device(count + 7)
        platform.set_device(0)
        problem = f"set_device({count + 7}) is taken where there are {count} devices"
        raise Failed(explain(problem, legal="RuntimeError, ValueError, AssertionError or IndexError", fix=_ERRORS))
    if platform.device_name != "cpu":
        try:
            torch.maximum(torch.ones(2).to(platform.current_device()), torch.ones(2))
        except RuntimeError as error:
            named, what = platform.device_name in str(error), "the error for tensors of two devices names none"
            expect(named, what, found=str(error)[:200], legal=f"a message with {platform.device_name!r}", fix=_ERRORS)
        else:
            problem = "an operator takes a tensor of the device and one of the host"
            raise Failed(explain(problem, legal="RuntimeError", fix=_ERRORS))


_ERRORS = "a run must stop where it goes wrong: let the SDK check what it is given"


@check(
    "verl's memory report, its offload decisions and the native rollout's cache size are built on them", group="memory"
)
def memory_figures(platform: Platform) -> None:
    module, device, block_bytes = platform.device_module, platform.current_device(), 64 * _MB
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    block = torch.ones(block_bytes // 4).to(device)
    held = module.memory_allocated() - before
    more, less = f"about {block_bytes} B more than before", "about as much as before"
    fix = f"torch.{platform.device_name} has to count the bytes of live tensors, for each device"
    expect(
        held > 50 * _MB, "memory_allocated() does not grow with a tensor", found=f"{held} B more", legal=more, fix=fix
    )
    free, total = module.mem_get_info()  # while something is held, so that the two differ
    what, legal = "mem_get_info() is no (free, total)", "0 < free < total while a tensor is held"
    expect(0 < free < total, what, found=(free, total), legal=legal, fix=fix)
    del block
    after, peak = module.memory_allocated() - before, module.max_memory_allocated() - before
    what = "memory_allocated() does not shrink when a tensor is gone"
    expect(after < 16 * _MB, what, found=f"{after} B more", legal=less, fix=fix)
    what = "max_memory_allocated() has forgotten a tensor"
    expect(peak > 50 * _MB, what, found=f"{peak} B more", legal=more, fix=fix)
    _reset_peak(platform, fix)
    platform.empty_cache()


def _reset_peak(platform: Platform, fix: str) -> None:
    """The host keeps its high-water mark in the kernel, where nothing resets it."""
    module = platform.device_module
    module.reset_peak_memory_stats()
    left = module.max_memory_allocated() - module.memory_allocated()
    what = "after reset_peak_memory_stats() the peak is still the one from before"
    expect(platform.device_name == "cpu" or left < 16 * _MB, what, found=f"{left} B above what is held", fix=fix)


@check("verl shows it; without the right error a run that lacks memory ends in a crash nobody can read", group="memory")
def out_of_memory(platform: Platform) -> None:
    need_accelerator(platform)
    device = platform.current_device()
    total = platform.device_module.get_device_properties(device).total_memory
    try:
        torch.empty(total + 64 * _MB, dtype=torch.uint8, device=platform.device_name)
    except torch.OutOfMemoryError:
        pass
    except Exception as error:
        problem = f"a tensor beyond the device's memory raises {type(error).__name__}"
        fix = "raise c10::OutOfMemoryError in the SDK's allocator (TORCH_CHECK_WITH(OutOfMemoryError, ...))"
        raise Failed(explain(problem, found=str(error)[:200], legal="torch.OutOfMemoryError", fix=fix)) from error
    else:
        problem = "a tensor larger than the device's memory can be made"
        fix = "tell the memory of one device in get_device_properties().total_memory"
        raise Failed(explain(problem, found=f"total_memory={total}", fix=fix))
    total_of_ones = torch.ones(4).to(device).sum().item()
    what, fix = "after an out-of-memory error the device computes wrong numbers", "leave the context usable"
    expect(total_of_ones == 4.0, what, found=total_of_ones, legal=4.0, fix=fix)


@check(
    "a run could not be repeated, and dropout would differ between the ranks of a tensor-parallel group", group="random"
)
def rng_seed(platform: Platform) -> None:
    device = platform.current_device()
    host = torch.get_rng_state()
    platform.manual_seed(1234)
    first = torch.rand(8, device=device)
    platform.manual_seed(1234)
    again, fix = torch.rand(8, device=device), "seed the current device's own generator, and no other"
    same = torch.equal(first.cpu(), again.cpu())
    expect(same, "manual_seed() does not repeat the numbers", found=again.tolist(), legal=first.tolist(), fix=fix)
    differ = len(set(first.tolist())) > 1
    expect(differ, "random numbers are all the same", found=first.tolist(), fix="let torch.rand use the generator")
    if platform.device_name != "cpu":
        kept = torch.equal(host, torch.get_rng_state())
        expect(kept, "manual_seed(), or a random number of the device, changes the host's generator", fix=fix)


@check("with several devices in one process, all but one would draw other numbers after a restart", group="random")
def rng_seed_all(platform: Platform) -> None:
    count = platform.device_count()
    names = ["cpu"] if platform.device_name == "cpu" else [f"{platform.device_name}:{index}" for index in range(count)]
    platform.manual_seed_all(77)
    first = [torch.rand(4, device=name).cpu() for name in names]
    platform.manual_seed_all(77)
    again = [torch.rand(4, device=name).cpu() for name in names]
    wrong = [name for name, a, b in zip(names, first, again, strict=True) if not torch.equal(a, b)]
    fix = "seed the generator of every visible device"
    expect(not wrong, "manual_seed_all() does not repeat the numbers", found=f"wrong on {', '.join(wrong)}", fix=fix)


@check("a resumed run would draw other numbers than one that went on", group="random")
def rng_state(platform: Platform) -> None:
    module, device = platform.device_module, platform.current_device()
    torch.rand(3, device=device)
    state = module.get_rng_state()
    first = torch.rand(8, device=device)
    module.set_rng_state(state)
    again, what = torch.rand(8, device=device), "set_rng_state() does not bring get_rng_state()'s numbers back"
    fix = f"torch.{platform.device_name}'s two functions have to read and write the generator that torch.rand uses"
    expect(torch.equal(first.cpu(), again.cpu()), what, found=again.tolist(), legal=first.tolist(), fix=fix)


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
            wrong = int(_bits(back).ne(_bits(source)).sum()) if back.shape == source.shape else source.numel()
            expect(
                wrong == 0 and back.dtype == dtype and back.shape == source.shape,
                f"a {kind} {name} tensor comes back from the device changed",
                found=f"{wrong} bytes differ; {back.dtype}, {tuple(back.shape)}",
                legal=f"the same bits; {dtype}, {tuple(source.shape)}",
                fix=f"look at copy_ between host and device for {name}" + ("" if kind == "whole" else f", {kind}"),
            )
    scalar = torch.tensor(3.5).to(device)
    fix = "look at _local_scalar_dense"
    expect(scalar.item() == 3.5 and scalar.dim() == 0, "a scalar comes back changed", found=scalar, legal=3.5, fix=fix)


def _holds(platform: Platform, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point and dtype is not torch.float32:
        try:
            torch.empty(1, dtype=dtype, device=platform.device_name)
        except (RuntimeError, TypeError):
            return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


@check("training in a dtype that the chip lacks fails late, or not at all and wrongly", group="dtypes")
def dtypes(platform: Platform) -> str:
    return "; ".join(
        _product(platform, feature, dtype, tolerance)
        for feature, dtype, tolerance in (("bf16", torch.bfloat16, 0.5), ("fp16", torch.float16, 0.1))
    )


def _product(platform: Platform, feature: str, dtype: torch.dtype, tolerance: float) -> str:
    """A product in the dtype is right where it is supported; right or refused where it is not."""
    claimed, device = platform.supports(feature)[0], platform.current_device()
    left, right = (torch.randn(32, 48, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    fix = f"say in `features` what the chip does with {feature}, or mend its matmul"
    try:
        product = (left.to(device, dtype) @ right.to(device, dtype).T).float().cpu()
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        expect(not claimed, f"supports({feature!r}) is True, and a product raises", found=raised[:300], fix=fix)
        return f"{feature} is refused"
    worst = (product - left @ right.T).abs().max().item()
    what = f"a {feature} product is far from the fp32 one; supports({feature!r}) is {claimed}"
    expect(worst < tolerance, what, found=f"off by {worst:.3f}", legal=f"less than {tolerance}", fix=fix)
    return f"{feature} is off by {worst:.2g}" + ("" if claimed else ", though supports() says no")


@check("a checkpoint could not be read back, on this machine or on one without the chip", group="checkpoints")
def checkpoint(platform: Platform) -> None:
    device, file = platform.current_device(), io.BytesIO()
    weight = torch.randn(17, 5, generator=torch.Generator().manual_seed(3))
    torch.save({"weight": weight.to(device), "rng": platform.device_module.get_rng_state()}, file)
    for where in ("cpu", platform.device_name):
        file.seek(0)
        state = torch.load(file, map_location=where, weights_only=True)
        found, what = state["weight"], f"torch.load(map_location={where!r})"
        fix = "look at how the SDK serialises storages (torch.serialization, generate_methods_for_privateuse1_backend)"
        expect(torch.equal(found.cpu(), weight), f"{what} changes the weights", fix=fix)
        expect(found.device.type == where, f"{what} puts them elsewhere", found=found.device, legal=where, fix=fix)
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
        what, found = f"{name}() costs much more than torch's own", f"{extra * 1e6:.1f} microseconds more"
        expect(extra < 5e-6, what, found=found, legal="at most 5", fix="keep the answer instead of asking the driver")
