"""Prompts that no worker will answer any more: found by their age or by their worker's death, then sent again."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

from verl_fl.rollout.watch import ERROR, Watch

logger = logging.getLogger("verl_fl.rollout")

_PING_S = 5.0


def remember(manager: Any, prompts: Any) -> None:
    """Keep, for each prompt of the batch, the row it is and the worker it goes to."""
    sent = manager.__dict__.setdefault("_fl_sent", {})
    row = 0
    for worker, chunk in zip(manager.agent_loop_workers, prompts.chunk(len(manager.agent_loop_workers)), strict=False):
        for _ in range(len(chunk)):
            sent[str(prompts["uid"][row])] = (prompts, row, worker)
            row += 1


def handle(buffer: Any, watch: Watch, trainer: Any) -> bool:
    """Send again or drop what is lost. Returns whether the TransferQueue was changed."""
    waiting = {
        (partition, uid)
        for keys in (buffer.pending_keys, buffer.running_keys)
        for partition, uids in keys.items()
        for uid in uids
    }
    manager = getattr(trainer, "agent_loop_manager", None)
    sent = getattr(manager, "_fl_sent", {})
    for uid in sent.keys() - {uid for _, uid in waiting}:
        del sent[uid]
    limit_s = f"no answer after {watch.settings.rollout__prompt_timeout_s:g} s"
    lost = {key: limit_s for key in watch.overdue(waiting)}
    dead = find_dead(manager) if waiting and sent else []
    orphans = {uid for uid, (_, _, worker) in sent.items() if worker in dead}
    lost.update({key: "its agent-loop worker has died" for key in waiting if key[1] in orphans})
    decided = {key: (watch.lost(*key, known=key[1] in sent), why) for key, why in sorted(lost.items())}
    _log(decided)
    for (partition, uid), (action, why) in decided.items():
        if action == "resend":
            watch.resent(resend(buffer, trainer, partition, uid))
        else:
            drop(partition, uid, why)
    return bool(lost)


def _log(decided: dict[tuple[str, str], tuple[str, str]]) -> None:
    done = {"resend": "sent again", "drop": "dropped, and counted as failed"}
    for action, why in sorted(set(decided.values())):
        uids = [uid for (_, uid), decision in decided.items() if decision == (action, why)]
        more = f" and {len(uids) - 4} more" if len(uids) > 4 else ""
        logger.error("rollout: %s: %s: prompt %s%s", why, done[action], ", ".join(uids[:4]), more)


def drop(partition: str, uid: str, why: str) -> None:
    """Mark the prompt failed; verl then treats it as any failed group."""
    from verl.trainer.ppo.v1 import replay_buffer

    tag = {"status": "failure", f"{ERROR}lost": f"lost prompt: {why}"}
    replay_buffer.tq.kv_batch_put(keys=[uid], partition_id=partition, tags=[tag])


def resend(buffer: Any, trainer: Any, partition: str, uid: str) -> str:
    """Clear the prompt and what it has produced, submit it anew, and return its uid.

    A training prompt gets a new uid: if the first worker was slow rather than dead, what it still writes must not
    land in the group that is trained on. Validation counts by uid, so there it stays.
    """
    from verl.trainer.ppo.v1 import replay_buffer
    from verl.utils import tensordict_utils as tu

    manager = trainer.agent_loop_manager
    prompts, row, _ = manager._fl_sent[uid]
    buffer._clear_groups(partition, {uid})
    batch = tu.index_select_tensor_dict(prompts, [row])
    if partition == "train":
        uid = str(uuid.uuid4())
        tu.assign_non_tensor_stack(batch, "uid", [uid])
        tu.assign_non_tensor_data(batch, "global_steps", trainer.global_steps)
        trainer._submit_batch_to_rollout(batch)
    else:
        tag = {"is_prompt": True, "status": "pending", "global_steps": trainer.global_steps}
        replay_buffer.tq.kv_batch_put(keys=[uid], partition_id=partition, tags=[tag])
        manager.generate_sequences(batch)
    return uid


def find_dead(manager: Any, *, wait_s: float = 0.0) -> list[Any]:
    """Workers known to be dead. Asks each at most every 5 s, and waits ``wait_s`` at most for the answers."""
    import ray

    pings = manager.__dict__.setdefault("_fl_pings", {})
    now = time.monotonic()
    for worker in manager.agent_loop_workers:
        ref, asked = pings.get(worker, (None, -_PING_S))
        if ref is None and (now - asked >= _PING_S or wait_s):
            pings[worker] = (worker.__ray_ready__.remote(), now)
    refs = {ref: worker for worker, (ref, _) in pings.items() if ref is not None}
    ready = ray.wait(list(refs), num_returns=len(refs), timeout=wait_s)[0] if refs else []
    dead = manager.__dict__.setdefault("_fl_dead", [])
    for ref in ready:
        worker = refs[ref]
        pings[worker] = (None, pings[worker][1])
        try:
            ray.get(ref)
        except ray.exceptions.RayActorError:
            if worker not in dead:
                dead.append(worker)
    return dead


def drop_dead_workers(manager: Any) -> None:
    """Take dead workers off the manager's list, so that nothing more is sent to them.

    Raises:
        RuntimeError: none is left.
    """
    dead = find_dead(manager, wait_s=1.0)
    alive = [worker for worker in manager.agent_loop_workers if worker not in dead]
    if len(alive) == len(manager.agent_loop_workers):
        return
    logger.error("rollout: %d of %d agent-loop workers have died", len(dead), len(dead) + len(alive))
    if not alive:
        raise RuntimeError(
            "every agent-loop worker has died, so no prompt can be answered\n"
            "  do: look for the reason in `ray logs` and in the kernel's log (out of memory)"
        )
    manager.agent_loop_workers = alive
