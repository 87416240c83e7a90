"""verl's module constants that say what this machine is: they follow the platform, at the time they are used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl_fl import _verl
from verl_fl.patches.ledger import patch


class _Flag:
    """True where the process's platform has this device type and can use one.

    It asks when it is used, since a module takes it before the platform is known, and asking decides nothing.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device

    def __bool__(self) -> bool:
        return _usable(self._device)

    def __repr__(self) -> str:
        return f"<verl-fl: {self._device or 'an accelerator'} is {'' if self else 'not '}available>"


def _usable(device: str | None) -> bool:
    platform = _verl.expected_platform()
    fits = platform.device_name == device if device else platform.device_name != "cpu"
    return fits and bool(platform.is_available())


@patch(
    target="verl.utils.device:is_cuda_available",
    why="verl asks torch.cuda at import; the shims of other vendors answer yes, and then verl takes CUDA's path there",
    reference="case shim-makes-cuda; verl/utils/device.py",
    remove_when="verl's flag asks the platform",
)
def cuda_flag(original: bool) -> _Flag:
    return _Flag("cuda")


@patch(
    target="verl.utils.device:is_npu_available",
    why="verl asks torch.npu at import, whatever platform the process was told to use",
    reference="case shim-makes-cuda; verl/utils/device.py",
    remove_when="verl's flag asks the platform",
)
def npu_flag(original: bool) -> _Flag:
    return _Flag("npu")


@patch(
    target="verl.utils.device:is_torch_npu_available",
    why="verl takes Ascend's path wherever torch_npu is installed, whatever platform the process was told to use",
    reference="case shim-makes-cuda; verl/utils/device.py",
    remove_when="verl asks the platform",
)
def npu_package(original: Callable) -> Callable:
    @functools.wraps(original)
    def is_torch_npu_available(check_device: bool = True) -> bool:
        return _usable("npu") if check_device else _verl.expected_platform().device_name == "npu"

    return is_torch_npu_available


@patch(
    target="verl.workers.engine.utils:prime_delta_snapshots",
    why="verl hands its flag to torch as pin_memory, which takes a bool only; the patched flag is none",
    reference="patch cuda-flag; verl/workers/engine/base.py prime_delta_snapshots",
    remove_when="the patch cuda-flag is removed",
)
def pinned_snapshots(original: Callable) -> Callable:
    @functools.wraps(original)
    def prime_delta_snapshots(gen: Any, snaps: dict, pin: Any) -> None:
        return original(gen, snaps, pin=bool(pin))

    return prime_delta_snapshots


@patch(
    target="verl.utils.experimental.torch_functional:_FLASH_ATTN_CROSS_ENTROPY_AVAILABLE",
    why="verl runs FlashAttention's Triton kernel wherever the package is installed, on tensors of any device",
    reference="verl/utils/experimental/torch_functional.py _fused_linear_for_ppo_fwd",
    remove_when="verl asks the platform",
)
def fused_cross_entropy(original: bool) -> Any:
    class _Supported:
        def __bool__(self) -> bool:
            return original and _verl.supports("flash_attention_2")[0]

    return _Supported()


@patch(
    target="verl.utils.checkpoint.fsdp_checkpoint_manager:is_cuda_available",
    why="verl moves an FSDP1 checkpoint to the host only on CUDA; elsewhere it stays on a device that is full already",
    reference="verl/utils/checkpoint/fsdp_checkpoint_manager.py ShardedStateDictConfig",
    remove_when="verl offloads a checkpoint on every accelerator",
)
def checkpoint_offload(original: bool) -> _Flag:
    return _Flag(None)
