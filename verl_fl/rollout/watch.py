"""What the trainer knows of its prompts besides their status: why they failed, and how long they have been away.

A worker writes its reasons into the tag of the prompt it serves; the trainer reads them back here. Pure bookkeeping:
no verl, no ray, no clock but the one that is given.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from verl_fl._errors import explain
from verl_fl._settings import Settings
from verl_fl.reward.guard import all_failed

logger = logging.getLogger("verl_fl.rollout")

ERROR, FATAL, REWARD, EMPTY = "fl_error_", "fl_fatal_", "fl_reward_", "fl_empty_"
"""Tag prefixes; the session id follows. A failed session, one that ends the run, a failed reward, an empty answer."""

METRICS = ("rollout/failed_groups", "rollout/lost_prompts", "rollout/empty_answers", "reward/failed")

_LONGEST_GAP_S = 10.0


class Watch:
    """Counts failures and waiting time for one replay buffer."""

    def __init__(self, settings: Settings, *, batch_size: int = 8, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.failures_in_a_row = 0
        self._limit = max(8, batch_size)
        self._clock = clock
        self._last: float | None = None
        self._ages: dict[tuple[str, str], float] = {}
        self._seen: set[tuple[str, str]] = set()
        self._causes: Counter[str] = Counter()
        self._logged: Counter[str] = Counter()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._resent: set[str] = set()

    # --- failures -----------------------------------------------------------------------------------------------

    def fresh(self, partition: str, uids: Iterable[str]) -> set[str]:
        """Those of ``uids`` that were not asked for before in this partition."""
        new = {uid for uid in uids if (partition, uid) not in self._seen}
        self._seen |= {(partition, uid) for uid in new}
        return new

    def keep(self, partition: str, uids: set[str]) -> None:
        """Forget prompts that the partition no longer has."""
        self._seen = {key for key in self._seen if key[0] != partition or key[1] in uids}

    def failed(self, partition: str, uid: str, tag: dict[str, Any]) -> None:
        """Note a failed group and log each distinct cause once, then at each power of ten.

        Raises:
            RuntimeError: its tag says that the run is to end.
        """
        self._counts[partition, "rollout/failed_groups"] += 1
        self.failures_in_a_row += 1
        fatal = _texts(tag, FATAL)
        if fatal:
            raise RuntimeError(
                explain(
                    "a reward call failed",
                    asked="fl.reward.on_error=raise",
                    found=fatal[0],
                    fix="mend the reward function, or set fl.reward.on_error=count to score such samples 0",
                )
            )
        for text in _texts(tag, ERROR) or [f"prompt {uid} failed, and its worker gave no reason"]:
            self.note("rollout", text)

    def note(self, room: str, text: str) -> None:
        """Count ``text`` as a cause and log it if its turn has come."""
        self._causes[text] += 1
        kind = f"{room}: {re.sub(r'[0-9a-f-]{36}|[0-9]+', '#', text)}"
        self._logged[kind] += 1
        count = self._logged[kind]
        if count == 10 ** (len(str(count)) - 1):
            logger.error("%s: %s%s", room, text, f" ({count} times so far)" if count > 1 else "")

    def succeeded(self) -> None:
        """A group has finished: failures before it are no longer in a row."""
        self.failures_in_a_row = 0

    def check_streak(self) -> None:
        """Stop a run that replaces failed prompts for ever.

        Raises:
            RuntimeError: as many groups failed in a row as a batch has, and at least 8.
        """
        if self.failures_in_a_row >= self._limit:
            raise RuntimeError(self.nothing_left(f"{self.failures_in_a_row} prompts in a row failed"))

    def nothing_left(self, problem: str) -> str:
        """The message for a run that can't go on, with the causes seen since the last batch, commonest first."""
        causes = [f"{count} x {text}" for text, count in self._causes.most_common(3)]
        return explain(
            problem,
            found="\n    ".join(causes) or "no worker gave a reason",
            fix="mend the cause; the whole traceback is in the log of AgentLoopWorkerTQ (ray logs)",
        )

    def read_batch(self, partition: str, tags: Iterable[dict[str, Any]], sessions: int) -> None:
        """Count failed rewards and empty answers among the prompts of a batch of ``sessions`` trajectories.

        Raises:
            RuntimeError: no reward call of the batch worked.
        """
        tags = list(tags)
        rewards = [text for tag in tags for text in _texts(tag, REWARD)]
        empty = sum(len(_texts(tag, EMPTY)) for tag in tags)
        self._counts[partition, "reward/failed"] += len(rewards)
        self._counts[partition, "rollout/empty_answers"] += empty
        for text in rewards:
            self.note("reward", text)
        if rewards and len(rewards) >= sessions:
            raise RuntimeError(all_failed(len(rewards), [text for text, _ in Counter(rewards).most_common(3)]))
        if empty and empty >= sessions:
            logger.warning(
                "rollout: all %d answers of the batch are empty, so this step learns nothing; look at the end-of-text "
                "token of the chat template and at rollout.response_length",
                empty,
            )

    def take_metrics(self, partition: str) -> dict[str, int]:
        """The partition's counts since the last call, by metric name without verl's prefix; zeros included."""
        self._causes.clear()
        return {name: self._counts.pop((partition, name), 0) for name in METRICS}

    # --- lost prompts -------------------------------------------------------------------------------------------

    def overdue(self, waiting: set[tuple[str, str]]) -> set[tuple[str, str]]:
        """Those of ``waiting`` (partition, uid) for which the trainer has waited longer than the limit.

        Only time between two calls counts, and never more than 10 s of it: while the trainer trains, it doesn't wait.
        """
        now = self._clock()
        step = 0.0 if self._last is None else min(now - self._last, _LONGEST_GAP_S)
        self._last = now
        self._ages = {key: self._ages.get(key, -step) + step for key in waiting}
        limit = float(self.settings.rollout__prompt_timeout_s)
        return {key for key, age in self._ages.items() if limit and age > limit}

    def lost(self, partition: str, uid: str, *, known: bool) -> str:
        """Note a lost prompt and say what to do with it: ``resend`` or ``drop``. ``known``: its row was kept."""
        self._counts[partition, "rollout/lost_prompts"] += 1
        again = self.settings.rollout__on_lost == "resend" and known and uid not in self._resent
        return "resend" if again else "drop"

    def resent(self, uid: str) -> None:
        """``uid`` is a second try; if it is lost too, it will be dropped."""
        self._resent.add(uid)


def _texts(tag: dict[str, Any], prefix: str) -> list[str]:
    return [str(value) for key, value in sorted(tag.items()) if key.startswith(prefix)]
