"""Stand-ins for a vendor's torch package: they record each call, and refuse what the vendor does not have."""

import contextlib
import types


class StandIn(types.ModuleType):
    """``torch.<device>`` of a vendor. ``calls`` lists what was called, in order, with its arguments."""

    def __init__(self, name, **answers):
        super().__init__(name)
        self.calls = []
        self._answers = answers

    def __getattr__(self, name):
        if name.startswith("__") or name not in self._answers:
            raise AttributeError(f"the stand-in for {self.__name__} has no {name!r}")
        answer = self._answers[name]
        if isinstance(answer, (type, types.ModuleType)):
            return answer

        def call(*arguments, **keywords):
            self.calls.append((name, *arguments, *keywords.items()))
            return answer(*arguments) if callable(answer) else answer

        return call


def device(name, **more):
    """What every vendor's module has, and ``more``."""

    class Stream:
        musa_stream = 7

    class Event:
        pass

    return StandIn(
        name,
        **{
            **dict(is_available=True, current_device=1, device_count=2, set_device=None, synchronize=None),
            **dict(manual_seed=None, manual_seed_all=None, empty_cache=None, get_device_capability=(9, 0)),
            **dict(current_stream="the current stream", Stream=Stream, Event=Event),
            "stream": lambda stream: contextlib.nullcontext(stream),
            **more,
        },
    )


def memory(**answers):
    """``torch.<device>.memory``."""
    return StandIn("memory", **answers)
