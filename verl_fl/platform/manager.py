"""Which chip is this? Identity first, from evidence that no visibility mask can change; decided once a process."""

from __future__ import annotations

import os
import sys
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


def platform_classes() -> dict[str, type[Platform]]:
    """The platforms that verl-fl itself brings, by name."""
    from verl_fl.platform.cpu import CPUPlatform

    return {cls.name: cls for cls in (CPUPlatform,)}


def requested(argv: Iterable[str] | None = None) -> tuple[str, str] | None:
    """The platform that was asked for and where: ``VERL_PLATFORM``, else a ``fl=NAME`` argument of this command.

    The argument is read here because verl asks for the platform while it is being imported, before Hydra has a config.
    """
    if name := _env.read(_env.PLATFORM):
        return name.lower(), f"{_env.PLATFORM}={os.environ[_env.PLATFORM]!r}"
    for argument in sys.argv[1:] if argv is None else argv:
        key, _, value = argument.partition("=")
        if key in ("+fl", "fl", "++fl") and value in platform_classes():
            return value, f"argument {argument!r}"
    return None


def detect(foreign: dict[str, ProbeFn] | None = None, aliases: dict[str, str] | None = None) -> Detection:
    """Choose this machine's platform.

    Args:
        foreign: probes of platforms registered elsewhere (verl's own, other plugins'), by name.
        aliases: further names, mapped to the names above.

    Raises:
        ValueError: the requested name is unknown, or its platform is not on this machine, or two vendors are.
    """
    classes = platform_classes()
    asked_probes: dict[str, ProbeFn] = {**(foreign or {}), **{name: cls.probe for name, cls in classes.items()}}
    names = {name: name for name in asked_probes} | (aliases or {})
    names |= {alias: cls.name for cls in classes.values() for alias in cls.aliases}
    probes = {name: _run(probe) for name, probe in asked_probes.items()}

    if (request := requested()) is not None:
        asked, source = request
        if asked not in names:
            raise ValueError(_unknown(asked, source, names))
        chosen = names[asked]
        if not probes[chosen].found:
            raise ValueError(_absent(asked, source, probes))
        return Detection(name=chosen, reason=f"asked for by {source}", explicit=True, probes=probes)

    driver = names.get(_env.read(_env.DRIVER_PLATFORM).lower(), "")
    if driver and probes[driver].found:
        reason = "the driver was told to use it, and this node has it"
        return Detection(name=driver, reason=reason, explicit=True, probes=probes)

    found = [name for name, probe in probes.items() if probe.found and name != "cpu"]
    if len(found) > 1:
        raise ValueError(_ambiguous(found, probes))
    if found:
        return Detection(name=found[0], reason=probes[found[0]].reason, explicit=False, probes=probes)
    return Detection(name="cpu", reason="no accelerator was found", explicit=False, probes=probes)


def _run(probe: ProbeFn) -> Probe:
    """A broken SDK is a reason, never the end of another vendor's detection."""
    try:
        return probe()
    except Exception as error:  # whatever a vendor's SDK raises
        return Probe(found=False, reason=f"its probe failed: {type(error).__name__}: {error}")


def _table(probes: dict[str, Probe]) -> str:
    return "; ".join(f"{name}: {'yes' if probe.found else 'no'} ({probe.reason})" for name, probe in probes.items())


def _unknown(asked: str, source: str, names: dict[str, str]) -> str:
    return explain(
        f"unknown platform {asked!r}",
        asked=source,
        legal=", ".join(sorted(names)),
        fix="use one of these names, or unset the variable to let verl-fl detect the chip; a new chip registers "
        "itself with verl's @PlatformRegistry.register(platform=...) in a package with a verl.plugins entry point",
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
