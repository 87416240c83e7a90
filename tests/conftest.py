"""Fixtures for every test, and a watch for what a test leaves behind."""

import os
import signal
import threading

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so, and the tests that press Ctrl-C would press it on children that ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_MAY_CHANGE = {"PYTEST_CURRENT_TEST"} | {  # set once, by importing verl and what it imports
    "LAZY_LEGACY_OP",
    "RAY_CLIENT_MODE",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_CUDA_ARCH_LIST",
}


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fail the test that leaves environment variables, threads or a process group behind."""
    import sys

    env = dict(os.environ)
    threads = set(threading.enumerate())
    yield
    changed = {name for name in env.keys() ^ os.environ.keys() if name not in _MAY_CHANGE}
    changed |= {name for name in env.keys() & os.environ.keys() if env[name] != os.environ[name]} - _MAY_CHANGE
    for name in changed:
        if name in env:
            os.environ[name] = env[name]
        else:
            del os.environ[name]
    ours = [thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("verl_fl")]
    for thread in ours:
        thread.join(1.0)
    left = [thread for thread in ours if thread.is_alive()]
    torch_dist = sys.modules.get("torch.distributed")
    group = torch_dist is not None and torch_dist.is_available() and torch_dist.is_initialized()
    assert not changed, f"the test left environment variables changed: {sorted(changed)}"
    assert not left, f"the test left threads running: {left}"
    assert not group, "the test left a process group open"


@pytest.fixture
def fresh_platform(monkeypatch):
    """verl's platform singleton, undecided for this test and afterwards as it was."""
    from verl.plugin.platform import platform_manager

    monkeypatch.setattr(platform_manager, "_current_platform", None)
    return platform_manager
