"""``verl-fl doctor``: what is here, what it is good for, and what is missing. Works with verl or torch broken, too."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from verl_fl._errors import explain
from verl_fl._version import __version__


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """A package and what it is for."""

    package: str
    tested: str
    """The versions this release was tested with, as a specifier."""
    module: str | None
    """Imported to see that it really loads; None: its metadata is enough."""
    missing: str = ""
    """What does not work without it; empty: nothing does."""


REQUIREMENTS = (
    Requirement(package="torch", tested=">=2.7,<2.15", module="torch"),
    Requirement(package="ray", tested=">=2.41,<3", module="ray"),
    Requirement(package="verl", tested=">=0.9,<0.10", module="verl"),
    Requirement(package="transformers", tested=">=4.51,<6", module=None),
    Requirement(package="tensordict", tested=">=0.8,<0.11", module="tensordict"),
    Requirement(package="TransferQueue", tested=">=0.1.10,<0.2", module=None),
    Requirement(package="wrapt", tested=">=1.16", module="wrapt"),
    Requirement(package="vllm", tested=">=0.18", module=None, missing="actor_rollout_ref.rollout.name=vllm"),
    Requirement(package="gguf", tested=">=0.10", module=None, missing="quickstart --model FILE.gguf"),
    Requirement(package="matplotlib", tested=">=3.8", module=None, missing="quickstart's reward.png"),
    Requirement(package="flash-attn", tested=">=2", module=None, missing="attn_implementation=flash_attention_2"),
    Requirement(package="megatron-core", tested=">=0.10", module=None, missing="actor.strategy=megatron"),
)
"""Everything doctor looks for, what is needed first. The versions are the ones the tests ran with, or near them."""


@dataclass(kw_only=True, slots=True)
class Report:
    """All that doctor found. ``problems`` are what makes it unhealthy, each with what to do."""

    verl_fl: str = __version__
    packages: list[dict[str, Any]] = field(default_factory=list)
    plugins: list[dict[str, Any]] = field(default_factory=list)
    platform: dict[str, Any] = field(default_factory=dict)
    registered: dict[str, list[str]] = field(default_factory=dict)
    patches: list[dict[str, str]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    missing: list[dict[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether nothing that verl-fl needs is missing, broken or outside its range."""
        return not self.problems


_AT_ONCE = ("machine", "platform")
"""Fields that need neither torch nor verl. Platforms of other packages register with verl, so only ours are asked."""


def run(*, as_json: bool, only: str | None = None) -> int:
    """Print the report, or one field of it; return 0 where it is healthy, else 1.

    Raises:
        UsageError: there is no such field, or it can't be had alone.
    """
    if only is not None and only not in _AT_ONCE:
        from verl_fl.cli._exit import UsageError

        raise UsageError(
            explain("no such field", asked=f"--only {only}", legal=", ".join(_AT_ONCE), fix="leave --only out for all")
        )
    # What verl and its parts print and warn of while they are imported is not part of the report.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = examine() if only is None else _alone(only)
    if as_json:
        fields = asdict(report) if only is None else {only: asdict(report)[only], "problems": report.problems}
        print(json.dumps(fields | {"healthy": report.healthy}, indent=2))
    else:
        from verl_fl.cli.doctor_view import show

        show(report)
    return 0 if report.healthy else 1


def _alone(field: str) -> Report:
    report = Report()
    if field == "machine":
        _attempt(report, "the machine's resources", lambda: report.machine.update(_machine()))
    else:
        _attempt(report, "the platform", lambda: _look_at_platform(report, has_verl=False))
    return report


def examine() -> Report:
    """Look at everything; what can't be looked at becomes a problem, never an exception."""
    report = Report()
    _packages(report)
    _attempt(report, "the machine's resources", lambda: report.machine.update(_machine()))
    broken = {package["name"] for package in report.packages if not package["ok"]}
    if "torch" in broken:
        return report
    has_verl = "verl" not in broken
    _plugins(report)
    if not _attempt(report, "the platform", lambda: _look_at_platform(report, has_verl)):
        return report  # most of verl asks for the platform while it is imported, so it would fail in the same way
    if has_verl:
        _attempt(report, "the plugin verl_fl.plugin", _load_plugin, fix="pip install --force-reinstall verl-fl")
        _attempt(report, "verl's registries", lambda: report.registered.update(_registries()))
    _patches(report, has_verl)
    return report


def _packages(report: Report) -> None:
    python = sys.version.split()[0]
    good = (3, 10) <= sys.version_info[:2] < (3, 13)
    report.packages.append({"name": "python", "version": python, "tested": ">=3.10,<3.13", "ok": good, "note": ""})
    if not good:
        report.problems.append(
            f"python {python} is outside >=3.10,<3.13\n  do: make a virtual environment with another one"
        )
    for requirement in REQUIREMENTS:
        found, note = _look_at(requirement)
        needed = not requirement.missing
        row = {
            "name": requirement.package,
            "version": found,
            "tested": requirement.tested,
            "ok": not note,
            "note": note,
        }
        report.packages.append(row)
        install = f"pip install '{requirement.package}{requirement.tested}'"
        if note and needed:
            again = install.replace("install", "install --force-reinstall", 1) if "does not load" in note else install
            report.problems.append(f"{requirement.package} {note}\n  do: {again}")
        elif note:
            report.missing.append({"package": requirement.package, "for": requirement.missing, "do": install})


def _look_at(requirement: Requirement) -> tuple[str | None, str]:
    """Return the version, and what is wrong with it, or ``""``."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    try:
        found = version(requirement.package)
    except PackageNotFoundError:
        return None, "is not installed"
    if requirement.module is not None:
        try:
            importlib.import_module(requirement.module)
        except BaseException as error:  # a broken build may even call sys.exit
            if isinstance(error, KeyboardInterrupt):
                raise
            return found, f"does not load ({type(error).__name__}: {_first_line(error)})"
    if not SpecifierSet(requirement.tested, prereleases=True).contains(Version(found)):
        return found, f"{found} is outside the tested range {requirement.tested}"
    return found, ""


def _machine() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": os.cpu_count(),
        "cores_usable": usable,
        "memory_total_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "shared_memory_free_bytes": shared.free if shared else None,
        "disk_free_bytes": shutil.disk_usage(os.getcwd()).free,
        "temporary_free_bytes": shutil.disk_usage(tempfile.gettempdir()).free,
    }


def _plugins(report: Report) -> None:
    """Load every plugin of verl, as verl does, and say what verl hides: that one of them raised."""
    for plugin in entry_points(group="verl.plugins"):
        note = ""
        try:
            plugin.load()
        except BaseException as error:  # a package of somebody else's may even call sys.exit
            if isinstance(error, KeyboardInterrupt):
                raise
            note = f"{type(error).__name__}: {_first_line(error)}"
            owner = plugin.dist.name if plugin.dist else plugin.value
            report.problems.append(f"verl goes on without plugin {plugin.name}: {note}\n  do: mend or remove {owner}")
        report.plugins.append({"name": plugin.name, "module": plugin.value, "error": note})


def _load_plugin() -> None:
    importlib.import_module("verl_fl.plugin")


def _look_at_platform(report: Report, has_verl: bool) -> None:
    """The choice and every probe's reason; without verl over verl-fl's own platforms only."""
    from verl_fl.platform import flagcx, platform_classes

    if has_verl:
        from verl.plugin.platform import PlatformRegistry

        from verl_fl.patches.platform import detection as detect
    else:
        from verl_fl.platform.manager import detect

    found, library, requested = detect(), flagcx.find(), flagcx.requested()
    report.platform |= {
        "name": found.name,
        "reason": found.reason,
        "explicit": found.explicit,
        "probes": {name: {"found": probe.found, "reason": probe.reason} for name, probe in found.probes.items()},
        "flagcx": {**asdict(library), "requested": requested},
    }
    chosen = PlatformRegistry.get(found.name) if has_verl else platform_classes()[found.name]
    missing = flagcx.why_not(found.name, getattr(chosen, "flagcx", ""), library) if requested else ""
    report.problems += [missing] if missing else []


def _registries() -> dict[str, list[str]]:
    """The names that verl knows after its registries' modules were imported, so that our hooks have run."""
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.plugin.platform import PlatformRegistry
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    importlib.import_module("verl.trainer.ppo.v1")
    engines = [
        f"{model_type} {backend}: {', '.join('/'.join(on) if isinstance(on, tuple) else on for on in devices)}"
        for model_type, backends in EngineRegistry._engines.items()
        for backend, devices in backends.items()
    ]
    return {
        "platforms": sorted(PlatformRegistry.registered_names()),
        "engines": sorted(engines),
        "rollouts": sorted(RolloutReplicaRegistry._registry),
        "checkpoint_engines": sorted(CheckpointEngineRegistry._registry),
        "trainers": sorted(TRAINER_REGISTRY),
    }


def _patches(report: Report, has_verl: bool) -> None:
    """Import every patch's target, which applies it; a target whose own import needs an absent package is pending."""
    try:
        from verl_fl.patches import LEDGER
    except Exception as error:  # reported, like everything else here
        report.problems.append(f"the patches can't be read: {type(error).__name__}: {_first_line(error)}")
        return
    for patch in LEDGER.patches.values():
        note = ""
        try:
            if has_verl:
                importlib.import_module(patch.module)
        except ImportError as error:
            note = f"{patch.module} is not importable here ({_first_line(error)})"
        except Exception as error:  # a patch that no longer fits, or verl's own import
            note = f"{type(error).__name__}: {_first_line(error)}"
            report.problems.append(f"patch {patch.name}: {note}\n  do: install verl in the tested range")
        report.patches.append(
            {
                "name": patch.name,
                "state": LEDGER.state(patch.name),
                "target": patch.target,
                "why": patch.why,
                "remove_when": patch.remove_when,
                "note": note,
            }
        )


def _attempt(report: Report, what: str, look: Callable[[], object], fix: str = "see the packages above") -> bool:
    """Whether ``look`` came through; what it raises becomes a problem, with ``fix`` unless it brings its own."""
    try:
        look()
    except Exception as error:  # doctor's whole point is to go on
        remedy = "" if "\n  do: " in str(error) else f"\n  do: {fix}"
        report.problems.append(f"{what}: {type(error).__name__}: {error}{remedy}")
        return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
