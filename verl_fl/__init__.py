"""Stock verl on any AI accelerator, on several vendors in one job, and on no accelerator at all.

Importing this package loads none of torch, ray and verl. Everything starts in :mod:`verl_fl.plugin`, which verl
itself imports through the entry point group ``verl.plugins``.
"""

from verl_fl._version import __version__

__all__ = ["__version__"]
