"""verl's profilers and memory figures, for devices other than CUDA's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl_fl import _verl
from verl_fl.patches.ledger import patch


@patch(
    target="torch.cuda.nvtx:range",
    why="verl's fused linear cross entropy names its ranges with torch.cuda.nvtx, which raises in a torch without CUDA",
    reference="verl/utils/kernel/linear_cross_entropy.py",
    remove_when="verl uses platform.nvtx_range",
)
def profiler_range(original: Callable) -> Callable:
    @functools.wraps(original)
    def range(msg: str, *args: Any, **kwargs: Any) -> Any:
        platform = _verl.current_platform()
        return original(msg, *args, **kwargs) if platform.device_name == "cuda" else platform.nvtx_range(msg)

    return range


@patch(
    target="verl.utils.profiler.torch_profile:get_torch_profiler",
    why="verl profiles the activity CUDA whatever the device is, so that a trace from another one has no kernels",
    reference="verl/utils/profiler/torch_profile.py",
    remove_when="verl profiles the activity of the platform's device",
)
def profiler_activity(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_torch_profiler(*args: Any, **kwargs: Any) -> Any:
        from torch.profiler import ProfilerActivity, supported_activities

        profiler, device = original(*args, **kwargs), _verl.current_platform().device_name
        if device != "cuda" and ProfilerActivity.CUDA in profiler.activities:
            own = {_activity(device)} & supported_activities()  # a build without it for this device records the CPU
            profiler.activities = (profiler.activities - {ProfilerActivity.CUDA}) | own
            profiler.use_device = device if own else None
        return profiler

    return get_torch_profiler


def _activity(device: str) -> Any:
    """torch.profiler's activity of a device type; None where it has none."""
    from torch._C import _get_privateuse1_backend_name
    from torch.profiler import ProfilerActivity

    name = "PrivateUse1" if device == _get_privateuse1_backend_name() else device.upper()
    return getattr(ProfilerActivity, name, None)


@patch(
    target="verl.utils.profiler.performance:_get_current_mem_info",
    why="verl asks the device for its memory at every step, also where nothing is logged; a device module that "
    "lacks one of the three questions ends the run",
    reference="verl/utils/profiler/performance.py",
    remove_when="verl treats a device without memory figures as it treats torch.cpu",
)
def memory_figures(original: Callable) -> Callable:
    @functools.wraps(original)
    def _get_current_mem_info(unit: str = "GB", precision: int = 2) -> tuple[str, str, str, str]:
        module = _verl.current_platform().device_module
        if all(hasattr(module, name) for name in ("memory_allocated", "memory_reserved", "mem_get_info")):
            return original(unit, precision)
        zero = f"{0:.{precision}f}"
        return zero, zero, zero, zero

    return _get_current_mem_info
