"""Which chip is this? Identity first, from evidence that no visibility mask can change; decided once a process."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from verl_fl import _env
from verl_fl._errors import explain
from verl_fl.platform.base import Platform, Probe

ProbeFn = Callable[[], Probe]


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection:
    """The outcome of :func:`detect`."""

    name: str
    """The chosen platform."""

    reason: str
    """Why, in a sentence."""

    explicit: bool
    """Whether somebody asked for it, rather than that it was found."""

    probes: dict[str, Probe]
    """Every platform's own answer, in the order they were asked."""


_FILES = {
    "cuda": "CUDAPlatform",
    "metax": "MetaXPlatform",
    "npu": "NPUPlatform",
    "musa": "MUSAPlatform",
    "rocm": "ROCmPlatform",
    "xpu": "XPUPlatform",
    "mlu": "MLUPlatform",
    "generic": "GenericPlatform",
    "cpu": "CPUPlatform",
}
"""One vendor, one file: its name and its class. The names are also what ``+fl=`` takes."""

_PROBE_LIMIT_S = 20.0
"""A probe looks at files. Only a third party's can take longer, or one that imports torch on a slow disk."""

_FALLBACKS = ("generic", "cpu")
"""Taken, in this order, where no vendor's platform is found."""


def platform_classes() -> dict[str, type[Platform]]:
    """The platforms that verl-fl itself brings, by name."""
    return {
        name: getattr(importlib.import_module(f"verl_fl.platform.{name}"), class_name)
        for name, class_name in _FILES.items()
    }


def requested(names: Iterable[str] = _FILES, argv: Iterable[str] | None = None) -> tuple[str, str] | None:
    """The platform that was asked for and where: ``VERL_PLATFORM``, else a ``fl=NAME`` argument of this command.

    The argument is read here because verl asks for the platform while it is being imported, before Hydra has a config.

    Args:
        names: what ``fl=`` may name; another value is Hydra's to refuse.

    Raises:
        ValueError: ``VERL_PLATFORM`` holds several names.
    """
    if name := _env.read(_env.PLATFORM):
        source = f"{_env.PLATFORM}={os.environ[_env.PLATFORM]!r}"
        if len(name.replace(",", " ").split()) > 1:
            fix = "a process has one platform: set it for each process, on the node where it runs"
            raise ValueError(explain(f"{_env.PLATFORM} names several platforms", asked=source, fix=fix))
        return name.lower(), source
    for argument in sys.argv[1:] if argv is None else argv:
        key, _, value = argument.partition("=")
        if key in ("+fl", "fl", "++fl") and value in names:
            return value, f"argument {argument!r}"
    return None


def detect(
    foreign: dict[str, ProbeFn] | None = None,
    aliases: dict[str, str] | None = None,
    classes: dict[str, type[Platform]] | None = None,
) -> Detection:
    """Choose this machine's platform. Imports neither torch nor an SDK, unless ``generic`` may be the answer.

    Args:
        foreign: probes of platforms that are not of our contract, by name.
        aliases: further names, mapped to the names above.
        classes: platforms of our contract; by default those that verl-fl brings.

    Raises:
        ValueError: the requested name is unknown, or its platform is not on this machine, or two vendors are.
    """
    classes = platform_classes() if classes is None else classes
    asked_probes: dict[str, ProbeFn] = {**(foreign or {}), **{name: cls.probe for name, cls in classes.items()}}
    names = {name: name for name in asked_probes} | (aliases or {})
    names |= {alias: cls.name for cls in classes.values() for alias in cls.aliases}
    request = requested(names)
    if request is not None and request[0] not in names:
        raise ValueError(_unknown(*request, names))
    probes = _ask(asked_probes, wanted=names[request[0]] if request else "")

    if request is not None:
        asked, source = request
        chosen = names[asked]
        if not probes[chosen].found:
            raise ValueError(_absent(asked, source, probes))
        return Detection(name=chosen, reason=f"asked for by {source}", explicit=True, probes=probes)

    driver = names.get(_env.read(_env.DRIVER_PLATFORM).lower(), "")
    if driver and probes[driver].found:
        reason = "the driver was told to use it, and this node has it"
        return Detection(name=driver, reason=reason, explicit=True, probes=probes)

    found = [name for name, probe in probes.items() if probe.found and name not in _FALLBACKS]
    if len(found) > 1:
        raise ValueError(_ambiguous(found, probes))
    chosen = (found or [name for name in _FALLBACKS if name in probes and probes[name].found])[0]
    reason = probes[chosen].reason if chosen != "cpu" else _why_cpu(probes)
    return Detection(name=chosen, reason=reason, explicit=False, probes=probes)


def _ask(probes: dict[str, ProbeFn], wanted: str) -> dict[str, Probe]:
    """Every platform's answer, in the order given.

    ``generic`` may have to load torch, and torch then loads the SDK of a vendor that is here, which reads its mask
    before :meth:`Platform.adopt_mask` could settle it. So it is asked only where it may be the answer.
    """
    answers = {name: _run(probe) for name, probe in probes.items() if name != "generic"}
    taken = [wanted] if wanted else [name for name in answers if name not in _FALLBACKS]
    settled = [name for name in taken if name in answers and answers[name].found]
    if "generic" in probes:
        spared = Probe(found=False, reason=f"not asked, since {', '.join(settled)} was found")
        answers["generic"] = spared if settled else _run(probes["generic"])
    return {name: answers[name] for name in probes}


def _why_cpu(probes: dict[str, Probe]) -> str:
    unusable = [f"{name}: {probe.reason}" for name, probe in probes.items() if probe.unusable]
    return "no accelerator was found" + (f" that can be used ({'; '.join(unusable)})" if unusable else "")


_lock = threading.Lock()
_current: Platform | None = None


def get() -> Platform:
    """This process's platform without verl, decided once.

    Raises:
        ValueError: see :func:`detect`.
    """
    global _current
    with _lock:
        if _current is None:
            _current = platform_classes()[detect().name]()
        return _current


def reset() -> None:
    """Forget what :func:`get` decided. For tests."""
    global _current
    with _lock:
        _current = None


def _run(probe: ProbeFn) -> Probe:
    """A broken SDK is a reason, never the end of another vendor's detection, and neither is one that hangs."""
    answers: list[Probe] = []

    def ask() -> None:
        try:
            answers.append(probe())
        except BaseException as error:  # whatever a vendor's SDK raises, sys.exit included
            answers.append(Probe(found=False, reason=f"its probe failed: {type(error).__name__}: {error}"))

    thread = threading.Thread(target=ask, name="verl_fl-probe", daemon=True)
    thread.start()
    thread.join(_PROBE_LIMIT_S)
    answer = answers[0] if answers else Probe(found=False, reason=f"its probe did not end in {_PROBE_LIMIT_S:g} s")
    if not isinstance(answer, Probe):
        return Probe(found=False, reason=f"its probe returned {answer!r:.80}, not a Probe")
    return answer


def _table(probes: dict[str, Probe]) -> str:
    return "; ".join(f"{name}: {'yes' if probe.found else 'no'} ({probe.reason})" for name, probe in probes.items())


def _unknown(asked: str, source: str, names: dict[str, str]) -> str:
    return explain(
        f"unknown platform {asked!r}",
        asked=source,
        legal=", ".join(sorted(names)),
        fix="use one of these names, or unset the variable to let verl-fl detect the chip; a new chip comes with a "
        "package that calls verl_fl.register(MyPlatform): see verl_fl/platform/README.md",
    )


def _absent(asked: str, source: str, probes: dict[str, Probe]) -> str:
    return explain(
        f"platform {asked!r} was asked for, but this machine does not have it",
        asked=source,
        found=_table(probes),
        legal=", ".join(name for name, probe in probes.items() if probe.found),
        fix="install its driver and torch package, or ask for a platform that is there (`verl-fl doctor` lists them)",
    )


def _ambiguous(found: list[str], probes: dict[str, Probe]) -> str:
    return explain(
        f"this machine looks like several vendors: {', '.join(found)}",
        found=_table(probes),
        fix=f"say which one to use: {_env.PLATFORM}={found[0]}",
    )
