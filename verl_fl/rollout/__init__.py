"""Rollout engines that verl-fl adds to verl."""
