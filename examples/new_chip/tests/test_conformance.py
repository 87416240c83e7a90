"""The chip's whole test suite: one test for each check of verl-fl's kit."""

from verl_fl.testing import conformance_tests

test_new_chip = conformance_tests("new_chip.platform:NewChip")
