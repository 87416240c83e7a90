"""The conformance kit: what a platform must hold before a training trusts it, as one list of named checks.

``python -m verl_fl.testing.conformance TARGET`` needs nothing but torch; ``verl-fl conformance`` is the same command.
"""

from verl_fl.testing.conformance import identity  # noqa: F401, I001  the order in which checks are added and run
from verl_fl.testing.conformance import device, streams, collectives, training  # noqa: F401
from verl_fl.testing.conformance._check import CHECKS, Check, Failed, Skip

__all__ = ["CHECKS", "Check", "Failed", "Skip"]
