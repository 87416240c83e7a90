"""Hydra groups: ``fl=cpu`` today, one per platform later."""
