"""Names, evidence, masks: what is asked before a device is touched."""

from __future__ import annotations

import os
import re

import torch

from verl_fl.platform.base import FEATURES, Platform, Probe
from verl_fl.testing.conformance._check import Failed, check, expect
from verl_fl.testing.conformance._fresh import ask

_TYPES = {
    "is_available": ((), bool),
    "device_count": ((), int),
    "get_device_capability": ((0,), tuple),
    "communication_backend_name": ((), str),
    "visible_devices_envvar": ((), str),
    "process_group_backend": ((), str),
    "ray_resource_name": ((), str),
    "ray_resource_options": ((1,), dict),
    "ray_noset_envvars": ((), list),
    "is_ipc_supported": ((), bool),
    "rollout_env_vars": ((), dict),
    "get_device_uuid": ((0,), str),
}
"""Methods of the contract by what they take here and must return."""

_ACTIONS = ("set_device", "synchronize", "manual_seed", "manual_seed_all", "set_allocator_settings", "empty_cache")


@check("its names select it, stand in torch's device strings and key verl's engines", group="identity")
def names(platform: Platform) -> None:
    for attribute in ("name", "device_name", "vendor_name"):
        value = getattr(platform, attribute)
        expect(
            isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9]*", value),
            f"{attribute} is not one lower-case word",
            found=repr(value),
            legal="letters and digits, a letter first",
        )
    tensor = torch.ones(1).to(platform.current_device())
    expect(
        tensor.device.type == platform.device_name,
        "a tensor on the current device is not of device_name",
        found=f"device_name={platform.device_name!r}, the tensor is on {tensor.device}",
        fix="state torch's own word for the device in device_name",
    )


@check("verl calls them everywhere, and takes what they return without looking", group="identity")
def contract(platform: Platform) -> None:
    for name, (arguments, expected) in _TYPES.items():
        value = getattr(platform, name)(*arguments)
        fits = isinstance(value, expected) and not (expected is int and isinstance(value, bool))
        expect(fits, f"{name}() returns a {type(value).__name__}", found=repr(value)[:80], legal=expected.__name__)
    for name in _ACTIONS:
        expect(callable(getattr(platform, name, None)), f"{name} is not a method")
    index = platform.current_device()
    expect(
        isinstance(index, (int, torch.device)) and not isinstance(index, bool),
        f"current_device() returns a {type(index).__name__}",
        found=repr(index),
        legal="an index, or a torch.device where there are none",
    )


@check("verl and the support matrix ask it before they choose a dtype, an attention or a copy", group="identity")
def features(platform: Platform) -> None:
    for feature in FEATURES:
        answer = platform.supports(feature)
        fits = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], bool) and bool(answer[1])
        expect(fits, f"supports({feature!r}) is no answer", found=repr(answer), legal="(True or False, a reason)")
    try:
        platform.supports("no such feature")
    except ValueError:
        return
    raise Failed("supports() answers for a feature that does not exist; it has to raise ValueError")


@check(
    "detection runs on every node, with every mask, and must neither load the SDK nor change with the mask",
    group="identity",
    processes=3,
)
def probe(platform: Platform) -> None:
    code = (
        "probe = cls.probe()\n"
        "answer = [type(probe).__name__, getattr(probe, 'found', None), getattr(probe, 'reason', None),"
        " bool(cls.sdk) and cls.sdk in sys.modules]"
    )
    answers = {mask: ask(platform, code, mask=mask) for mask in (None, "", "0")}
    for mask, (kind, found, reason, loaded) in answers.items():
        shown = f"with {platform.visible_devices} {'unset' if mask is None else f'={mask!r}'}"
        expect(kind == Probe.__name__, f"probe() returns a {kind}", legal="a Probe")
        expect(found is True, f"probe() does not find the machine it runs on, {shown}", found=reason)
        expect(isinstance(reason, str) and reason, "probe() gives no reason", found=repr(reason))
        expect(not loaded, f"probe() loads the SDK {platform.sdk}, {shown}", fix="look for its files instead")


@check("a worker would train on another worker's device", group="visibility", processes=2)
def visibility(platform: Platform) -> None:
    if platform.device_name == "cpu":
        return
    last = platform.device_count() - 1
    device = platform.device_id(last)
    for mask, expected in (("", 0), (device, 1)):
        count = ask(platform, "answer = cls().device_count()", mask=mask)
        expect(
            count == expected,
            f"{platform.visible_devices}={mask!r} shows {count} devices",
            legal=expected,
            fix="name the variable that the runtime reads in visible_devices",
        )


@check("a mask that runtimes read differently must stop the process, not choose a device", group="visibility")
def mask_errors(platform: Platform) -> None:
    variable = platform.visible_devices_envvar()
    for text in ("0,0", "0,,1", "0,x", "-1"):
        try:
            platform.adopt_mask({variable: text})
        except ValueError as error:
            expect(variable in str(error), "the error for a bad mask does not name its variable", found=str(error))
        else:
            raise Failed(f"adopt_mask() takes {variable}={text!r}; it has to raise ValueError")
    ids = platform.adopt_mask({variable: "1,0"})
    expect(ids == ["1", "0"], "adopt_mask() does not return the mask's ids", found=ids, legal=["1", "0"])


@check("vLLM and verl tell devices apart by it, across processes", group="visibility")
def uuid(platform: Platform) -> None:
    count = platform.device_count()
    uuids = [platform.get_device_uuid(index) for index in range(count)]
    expect(uuids == [platform.get_device_uuid(index) for index in range(count)], "get_device_uuid() changes")
    variable, before = platform.visible_devices_envvar(), os.environ.get(platform.visible_devices_envvar())
    try:
        os.environ[variable] = "7,8"
        masked = [platform.get_device_uuid(0), platform.get_device_uuid(1)]
    finally:
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before
    expect(
        len(set(uuids)) == count and len(set(masked)) == 2,
        "get_device_uuid() gives two devices one name",
        found=f"{uuids}; under the mask 7,8: {masked}",
    )


@check("Ray could not place a worker, or would place it on a machine without the chip", group="placement")
def ray_resource(platform: Platform) -> None:
    name, options = platform.ray_resource_name(), platform.ray_resource_options(2)
    rays_own = name in ("", "CPU", "memory", "object_store_memory")
    expect(not rays_own, f"{name!r} counts no devices in Ray", legal="GPU, or a word like MYCHIP")
    asked = options.get("num_gpus") if name == "GPU" else options.get("resources", {}).get(name)
    expect(asked == 2, f"ray_resource_options(2) does not ask for 2 {name}", found=options)


@check("a profiling option would end the run", group="profiling")
def profiling(platform: Platform) -> None:
    entered = False
    with platform.nvtx_range("verl-fl conformance"):
        entered = True
    expect(entered, "nvtx_range() is no context")
    platform.profiler_start()
    platform.profiler_stop()
