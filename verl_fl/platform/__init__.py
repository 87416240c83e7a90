"""Which chip is this? The contract, one file a vendor, and the detection. Imports torch and the standard library."""

from verl_fl.platform.base import Platform, Probe
from verl_fl.platform.manager import Detection, detect, get, platform_classes, reset

__all__ = ["Detection", "Platform", "Probe", "detect", "get", "platform_classes", "reset"]
