"""Names, evidence, masks: what is asked before a device is touched."""

from __future__ import annotations

import re

import torch

from verl_fl._errors import explain
from verl_fl.platform.base import FEATURES, Platform, Probe
from verl_fl.testing.conformance._check import Failed, Skip, check, expect
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
            fix=f"state one word in {attribute}; it is no title for people",
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
        expect(
            fits,
            f"{name}() returns a {type(value).__name__}",
            found=repr(value)[:80],
            legal=expected.__name__,
            fix=f"return what Platform.{name} in verl_fl/platform/base.py does",
        )
    for name in _ACTIONS:
        what = f"{name} is not a method"
        expect(callable(getattr(platform, name, None)), what, fix=f"define it, or leave Platform.{name} alone")
    index = platform.current_device()
    expect(
        isinstance(index, (int, torch.device)) and not isinstance(index, bool),
        f"current_device() returns a {type(index).__name__}",
        found=repr(index),
        legal="an index, or a torch.device where there are none",
        fix="return what Tensor.to accepts",
    )


_SUPPORTS = "hand what the platform does not know to Platform.supports"


@check("verl and the support matrix ask it before they choose a dtype, an attention or a copy", group="identity")
def features(platform: Platform) -> None:
    fix = "state the difference in `features`, with the reason that a user should read"
    for feature in FEATURES:
        answer = platform.supports(feature)
        fits = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], bool) and bool(answer[1])
        expect(
            fits, f"supports({feature!r}) is no answer", found=repr(answer), legal="(True or False, a reason)", fix=fix
        )
    try:
        platform.supports("no such feature")
    except ValueError:
        return
    raise Failed(explain("supports() answers for a feature that does not exist", legal="ValueError", fix=_SUPPORTS))


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
    for mask in (None, "", "0"):
        kind, found, reason, loaded = ask(platform, code, mask=mask)
        shown = f"with {platform.visible_devices} {'unset' if mask is None else f'={mask!r}'}"
        expect(
            kind == Probe.__name__, f"probe() returns a {kind}", legal="a Probe", fix="return Probe(found=, reason=)"
        )
        what = f"probe() does not find the machine it runs on, {shown}"
        expect(found is True, what, found=reason, fix="look for the driver or the SDK's files, which no mask hides")
        told = isinstance(reason, str) and reason
        expect(told, "probe() gives no reason", found=repr(reason), fix="name the evidence in Probe.reason")
        expect(not loaded, f"probe() loads the SDK {platform.sdk}, {shown}", fix="look for its files instead")


@check("a worker would train on another worker's device", group="visibility", processes=2)
def visibility(platform: Platform) -> None:
    if platform.device_name == "cpu":
        raise Skip("the host has one device, and no mask hides it")
    for index in range(platform.device_count()):
        back = platform.device_index(platform.device_id(index))
        fix = "device_index() takes what device_id() gives, as Ray reports it"
        expect(back == index, "device_index() finds a device at another place", found=back, legal=index, fix=fix)
    device, variable = platform.device_id(platform.device_count() - 1), platform.visible_devices
    for mask, expected in (("", 0), (device, 1)):
        asked = "chip = cls()\nanswer = [chip.device_count(), chip.is_available()]"
        count, available = ask(platform, asked, mask=mask)
        expect(
            count == expected,
            f"{variable}={mask!r} shows {count} devices",
            legal=expected,
            fix="name the variable that the runtime reads in visible_devices",
        )
        expect(
            available is bool(expected),
            f"is_available() is {available} with {variable}={mask!r}",
            legal=bool(expected),
            fix="answer for this process, not for the machine",
        )


@check("a mask that runtimes read differently must stop the process, not choose a device", group="visibility")
def mask_errors(platform: Platform) -> None:
    variable = platform.visible_devices_envvar()
    for text in ("0,0", "0,,1", "0,x", "-1"):
        try:
            platform.adopt_mask({variable: text})
        except ValueError as error:
            what = "the error for a bad mask does not name its variable"
            expect(variable in str(error), what, found=str(error), fix=_MASKS)
        else:
            raise Failed(explain(f"adopt_mask() takes {variable}={text!r}", legal="ValueError", fix=_MASKS))
    for mask, legal in (({variable: "1,0"}, ["1", "0"]), ({variable: ""}, []), ({}, None)):
        ids = platform.adopt_mask(dict(mask))
        expect(ids == legal, f"adopt_mask() misreads {mask or 'no mask'}", found=ids, legal=legal, fix=_MASKS)


_MASKS = "let Platform.adopt_mask read the mask: verl_fl.platform.masks.parse knows what is a list of ids"


@check("vLLM and verl tell devices apart by it, across processes", group="visibility", processes=1)
def uuid(platform: Platform) -> None:
    count = platform.device_count()
    uuids = [platform.get_device_uuid(index) for index in range(count)]
    again = [platform.get_device_uuid(index) for index in range(count)]
    fix = "name the device by its serial number, or by its id in the mask"
    expect(uuids == again, "get_device_uuid() changes", found=f"{uuids}, then {again}", fix=fix)
    expect(len(set(uuids)) == count, "get_device_uuid() gives two devices one name", found=uuids, fix=fix)
    if platform.device_name != "cpu":
        seen = ask(platform, "answer = cls().get_device_uuid(0)", mask=platform.device_id(count - 1))
        what = "get_device_uuid() calls the last device something else where the process sees no other"
        expect(seen == uuids[-1], what, found=seen, legal=uuids[-1], fix=fix)


_RAY = "state a resource of the chip's own in ray_resource"


@check("Ray could not place a worker, or would place it on a machine without the chip", group="placement")
def ray_resource(platform: Platform) -> None:
    name, options = platform.ray_resource_name(), platform.ray_resource_options(2)
    rays_own = name in ("", "CPU", "memory", "object_store_memory")
    expect(not rays_own, f"{name!r} counts no devices in Ray", legal="GPU, or a word like MYCHIP", fix=_RAY)
    asked = options.get("num_gpus") if name == "GPU" else options.get("resources", {}).get(name)
    expect(asked == 2, f"ray_resource_options(2) does not ask for 2 {name}", found=options, fix=f"ask {name} for them")


@check("a profiling option would end the run", group="profiling")
def profiling(platform: Platform) -> None:
    entered = False
    with platform.nvtx_range("verl-fl conformance"):
        entered = True
    expect(entered, "nvtx_range() is no context", fix="yield once from it; without a profiler, do nothing")
    platform.profiler_start()
    platform.profiler_stop()
