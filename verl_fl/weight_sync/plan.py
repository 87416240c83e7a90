"""Who sends to whom: every host gets one copy over the network, and receivers pass it on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from verl_fl.weight_sync.outlets import Below

TOPOLOGIES = ("auto", "chain", "star", "tree")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a receiver said of itself before a sync."""

    below: Below
    mode: str
    """``full`` or ``delta``."""
    speed: float = 0.0
    """Bytes a second that came in at its last sync; 0: not known."""


def parents(
    receivers: Sequence[Seen], sender_host: str, *, topology: str, num_bytes: int, bucket_bytes: int
) -> dict[str, str | None]:
    """For each receiver's address the address it gets its bytes from; None: from the senders.

    Only receivers that get the same bytes (full or delta) can pass them on. On the senders' host each is fed directly,
    from one ring. Of every other host one receiver is fed over the network and feeds the others there. These leaders
    form a chain, fastest link first, so that the senders send once and every link works; where the model is so small
    that the way through the chain would take longer than the bytes, a binary tree.
    """
    found: dict[str, str | None] = {}
    for mode in sorted({seen.mode for seen in receivers}):
        group = [seen for seen in receivers if seen.mode == mode]
        if topology == "star":
            found |= {seen.below.address: None for seen in group}
            continue
        hosts: dict[str, list[Seen]] = {}
        for seen in group:
            hosts.setdefault(seen.below.host, []).append(seen)
        found |= {seen.below.address: None for seen in hosts.pop(sender_host, [])}
        leaders = []
        for local in hosts.values():
            local.sort(key=lambda seen: -seen.speed)
            leaders.append(local[0])
            found |= {seen.below.address: local[0].below.address for seen in local[1:]}
        leaders.sort(key=lambda seen: -seen.speed)
        fan_out = (
            1
            if topology == "chain" or (topology == "auto" and _chain_wins(len(leaders), num_bytes, bucket_bytes))
            else 2
        )
        for k, seen in enumerate(leaders):
            found[seen.below.address] = leaders[(k - 1) // fan_out].below.address if k else None
    return found


def _chain_wins(num_leaders: int, num_bytes: int, bucket_bytes: int) -> bool:
    """Buckets' times until the last end has all: a chain sends each byte once, a binary tree twice but less deep."""
    buckets = max(1.0, num_bytes / bucket_bytes)
    chain = buckets + num_leaders - 1
    tree = 2 * buckets + 2 * math.log2(max(num_leaders, 1) + 1)
    return chain <= tree
