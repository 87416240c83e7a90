"""The package version, alone in a file so that building the wheel imports nothing."""

__version__ = "0.1.0"
