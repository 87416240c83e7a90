"""How do new weights reach the rollout? ``Sender`` and ``Receiver`` for any two processes; verl's engines on top.

Nothing here needs verl or Ray but the two files ``engine.py`` and ``gloo_engine.py``.
"""

from typing import Any

__all__ = ["Receiver", "Report", "Sender", "SyncError"]


def __getattr__(name: str) -> Any:
    import importlib

    places = {"Receiver": "receiver", "Report": "report", "Sender": "sender", "SyncError": "_errors"}
    if name not in places:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{places[name]}"), name)
