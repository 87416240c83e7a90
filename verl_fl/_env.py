"""Every environment variable that verl-fl reads or sets.

Only what must be known before there is a config stands here; all else is config (``fl.*``).
Precedence where both exist: an explicit variable, then the config, then detection.
"""

import os

PLATFORM = "VERL_PLATFORM"
"""Platform of this process by name, in any case. Wins over everything."""

DRIVER_PLATFORM = "VERL_FL_DRIVER_PLATFORM"
"""Set by verl-fl in Ray's runtime environment: the platform the driver was *told* to use. A worker follows it only
where its own node has that platform, so a driver never forces its vendor on a node of another one."""

NUM_THREADS = "VERL_FL_NUM_THREADS"
"""Torch threads of each trainer or rollout process; unset: the node's cores shared by its trainer processes."""

PLACEMENT_TIMEOUT_S = "VERL_FL_PLACEMENT_TIMEOUT_S"
"""Seconds to wait for Ray to place a pool that the cluster could hold but does not hold now. Default 300."""

USE_FLAGCX = "USE_FLAGCX"
"""1: FlagCX is the backend of every torch process group, or the process fails with the reason. verl's own switch."""

FLAGCX_PATH = "FLAGCX_PATH"
"""Folder of a FlagCX build; the library is looked for in it, its ``lib`` and its ``build/lib``."""

RAY_UNIT_RESOURCES = "RAY_custom_unit_instance_resources"
"""Ray's own: the custom resources whose units it numbers, so that each actor knows which device it has."""

SECRET = "VERL_FL_SECRET"
"""Of weight sync outside of verl: both ends need the same. In a verl job the driver makes one."""

SIMULATED = "VERL_FL_SIMULATED"
"""Which simulated chips this machine has, by name with commas between. Unset: all whose package is installed."""

FORWARDED = (NUM_THREADS, PLACEMENT_TIMEOUT_S, "VERL_ENGINE_DEVICE", "VERL_ENGINE_VENDOR", "HF_HUB_OFFLINE", "HF_HOME")
"""Variables that a worker needs as the driver has them. No device mask is ever among them."""


def read(name: str) -> str:
    """Return the variable's value without surrounding blanks, or ``""``."""
    return os.environ.get(name, "").strip()
