"""Device masks such as ``CUDA_VISIBLE_DEVICES``: read strictly, before a runtime reads them in its own way."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

from verl_fl._errors import explain

logger = logging.getLogger("verl_fl.platform")

_UUIDS = ("GPU-", "MIG-")
"""How the UUIDs begin that CUDA and HIP take."""


def parse(text: str, *, variable: str, uuids: bool = False, device_count: int | None = None) -> list[str]:
    """The ids of a mask, in its order; an empty mask shows no device.

    Args:
        uuids: whether the vendor's runtime takes names such as ``GPU-...`` beside numbers.
        device_count: devices of the machine, where that is known.

    Raises:
        ValueError: a gap, a word, a negative number, an id twice, or more ids than devices.
    """
    if not text.strip():
        return []
    ids = [part.strip() for part in text.split(",")]
    problem = _problem(ids, uuids, device_count)
    if problem:
        legal = "ids from 0, each once, with commas between" + (", or the devices' UUIDs" if uuids else "")
        raise ValueError(
            explain(
                f"{variable} {problem}",
                asked=f"{variable}={text!r}",
                found=None if device_count is None else f"{device_count} devices on this machine",
                legal=legal,
                fix=f"correct {variable} where this process is started, or unset it to use all devices",
            )
        )
    return ids


def _problem(ids: list[str], uuids: bool, device_count: int | None) -> str:
    """What is wrong, or ``""``. Runtimes disagree on what they make of it, so none of it may reach one."""
    if "" in ids:
        return "has a gap"
    numbers = [one for one in ids if one.isascii() and one.isdecimal()]
    words = [one for one in ids if one not in numbers and not (uuids and one.startswith(_UUIDS))]
    if words:
        return f"has {words[0]!r}, which is not a device id"
    same = [str(int(one)) if one in numbers else one for one in ids]  # 1 and 01 are one device
    twice = sorted({one for one in same if same.count(one) > 1})
    if twice:
        return f"has {twice[0]} twice"
    if device_count is not None:
        if len(ids) > device_count:
            return f"has {len(ids)} ids"
        absent = [one for one in numbers if int(one) >= device_count]
        if absent:
            return f"has {absent[0]}, which does not exist"
    return ""


def adopt(
    environ: MutableMapping[str, str], own: str, aliases: tuple[str, ...], *, sdk_loaded: bool
) -> dict[str, str] | None:
    """Leave only the mask ``own`` of ``own`` and ``aliases``; return what ``environ`` held of them, None: nothing.

    A launcher or Ray may have set another vendor's variable for this process. It moves into ``own`` where that is
    unset; where both are set, ``own`` was meant. An empty one says nothing of this vendor: older versions of Ray set
    it for every actor that asks for no GPU.

    Raises:
        RuntimeError: the SDK has read its mask already, so that moving one into it would come too late.
    """
    for name in aliases:
        if not environ.get(name, "").strip():
            environ.pop(name, None)
    given = {name: environ[name] for name in (own, *aliases) if name in environ}
    others = [name for name in given if name != own]
    if others and own not in given:
        if sdk_loaded:
            raise RuntimeError(
                explain(
                    f"{others[0]} comes too late: the runtime has read {own} already, and saw none",
                    asked=f"{others[0]}={given[others[0]]!r}",
                    found="the vendor's torch package is imported",
                    legal=f"{own}, set before Python starts",
                    fix=f"start the process with {own}={given[others[0]]}",
                )
            )
        environ[own] = given[others[0]]
    for name in others:
        if given[name] != environ[own]:
            logger.warning("platform: %s=%s is ignored here, %s=%s counts", name, given[name], own, environ[own])
        del environ[name]
    return given or None
