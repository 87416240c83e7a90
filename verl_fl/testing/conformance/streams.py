"""Streams and events: work that runs beside its caller, and how it is waited for."""

from __future__ import annotations

import torch

from verl_fl.platform.base import Platform
from verl_fl.testing.conformance._check import Skip, check, expect
from verl_fl.testing.conformance.device import need_accelerator

_MB = 1 << 20


def _need(platform: Platform, *features: str) -> None:
    need_accelerator(platform)
    for feature in features:
        works, why = platform.supports(feature)
        if not works:
            raise Skip(why)


@check("weight sync would send a buffer before its copy has arrived", group="streams")
def pinned_copy(platform: Platform) -> None:
    _need(platform, "pinned_memory")
    expected = torch.arange(1.0, _MB + 1)
    source, target = expected.to(platform.current_device()), torch.zeros(_MB).pin_memory()
    fix = "say in `features` that there is no pinned_memory, or mend it in the SDK"
    expect(target.is_pinned(), "pin_memory() returns memory that is not pinned", fix=fix)
    stream = platform.new_stream()
    stream.wait_stream(platform.current_stream())
    fix = "event.synchronize() has to block until all work recorded before the event is done"
    for _ in range(4):  # one copy alone may arrive while this process rests
        event = platform.new_event()
        with platform.device_module.stream(stream):
            target.copy_(source, non_blocking=True)
            event.record(stream)
        event.synchronize()
        missing = int(target.ne(expected).sum())
        stream.synchronize()
        what = "after event.synchronize() a copy to pinned memory has not arrived"
        expect(missing == 0, what, found=f"{missing} of {_MB} values are missing", fix=fix)
        target.zero_()


@check("copies of weight sync and FSDP's gathering run beside computing, and must be waited for", group="streams")
def streams(platform: Platform) -> None:
    _need(platform, "streams")
    stream, home = platform.new_stream(), platform.current_stream()
    tensor = torch.ones(_MB).to(platform.current_device())
    stream.wait_stream(home)
    fix = "platform.stream(s) has to be torch's own context, which makes s current and then the one from before"
    with platform.stream(stream):
        inside = platform.current_stream()
        expect(inside == stream, "inside stream(s) the current stream is not s", found=inside, legal=stream, fix=fix)
        tensor.mul_(3)
        done = stream.record_event()
    back, what = platform.current_stream(), "after stream(s) the current stream is not the one from before"
    expect(back == home, what, found=back, legal=home, fix=fix)
    home.wait_event(done)
    wrong = int(tensor.add(1).cpu().ne(4).sum())
    what = "work that waited for a stream's event has read what was there before it"
    fix = "stream.wait_event() has to hold back what is queued on that stream afterwards"
    expect(wrong == 0, what, found=f"{wrong} of {_MB} values are old", fix=fix)
    stream.synchronize()
    fix = "query() says whether all work is done, without blocking"
    expect(stream.query() and done.query(), "query() of finished work is not True", legal=True, fix=fix)


@check("verl times its steps, and reads results of a step, after it", group="streams")
def synchronize(platform: Platform) -> None:
    _need(platform, "pinned_memory", "streams")
    source, target = torch.full((_MB,), 2.0).to(platform.current_device()), torch.zeros(_MB).pin_memory()
    stream = platform.new_stream()
    stream.wait_stream(platform.current_stream())
    fix = "synchronize() has to wait for all streams of the device, not for the current one"
    for _ in range(4):
        with platform.device_module.stream(stream):
            target.copy_(source, non_blocking=True)
        platform.synchronize()
        missing = int(target.ne(2).sum())
        stream.synchronize()
        what = "after synchronize() a copy of another stream has not arrived"
        expect(missing == 0, what, found=f"{missing} of {_MB} values are missing", fix=fix)
        target.zero_()
