"""What we change in stock verl, why, and until when. Importing this loads no verl: every change waits for its target."""

from verl_fl.patches import attention, distributed, logging, platform, resources
from verl_fl.patches.ledger import LEDGER, Ledger, Patch

__all__ = ["LEDGER", "Ledger", "Patch", "attention", "distributed", "logging", "platform", "resources"]
