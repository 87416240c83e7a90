"""The plugin in a fresh interpreter, as verl meets it."""

import subprocess
import sys

import pytest


def run(code, **env):
    import os

    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env={**os.environ, **env}
    )


REGISTERED = """
import verl
from verl.plugin.platform import PlatformRegistry, platform_manager
print(PlatformRegistry.get("cpu") is not None, platform_manager._current_platform)
"""


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"VERL_USE_EXTERNAL_PLUGINS": "fl"},
        {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "verl_fl.plugin"},
    ],
    ids=["auto", "by name", "as a module"],
)
def test_import_verl_registers_without_fixing_the_platform(env):
    assert run(REGISTERED, **env).stdout.split() == ["True", "None"]


def test_a_user_can_switch_it_off():
    result = run(REGISTERED, VERL_USE_EXTERNAL_PLUGINS="none")
    assert result.stdout.split() == ["False", "None"]


def test_a_broken_plugin_is_reported_not_swallowed():
    code = """
import importlib.metadata as m
real = m.version
m.version = lambda name: "0.10.3" if name == "verl" else real(name)
import verl
print("verl goes on")
"""
    result = run(code)
    assert "verl goes on" in result.stdout
    assert "verl 0.10.3 is outside the range" in result.stderr
    assert "verl-fl doctor" in result.stderr and "pip install 'verl>=0.9,<0.10'" in result.stderr


def test_engines_rollout_and_checkpoint_engine_are_registered():
    code = """
import verl
import verl.workers.engine, verl.checkpoint_engine
from verl.workers.engine.base import EngineRegistry
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.checkpoint_engine.base import CheckpointEngineRegistry
for model in ("language_model", "value_model"):
    for backend in ("fsdp", "fsdp2"):
        print(EngineRegistry.get_engine_cls(model, backend).__module__)
print(get_rollout_class("native").__module__, RolloutReplicaRegistry.get("native").__name__)
print(CheckpointEngineRegistry.get("gloo").__name__)
"""
    result = run(code, VERL_PLATFORM="cpu")
    assert result.stdout.split() == ["verl_fl.engine.fsdp"] * 4 + [
        "verl_fl.rollout.native.adapter",
        "NativeReplica",
        "GlooCheckpointEngine",
    ], result.stderr[-2000:]


def test_another_plugins_platform_is_found_by_detection():
    code = """
import verl
from verl.plugin.platform import PlatformRegistry, get_platform
class Late(PlatformRegistry.get("cpu")):
    device_name = vendor_name = "late"
    def is_platform_available(self, use_smi_check=False):
        return True
PlatformRegistry.register(platform="late")(Late)
print(get_platform().vendor_name)
"""
    assert run(code).stdout.strip() == "late"
