"""Finds stop strings in a growing token sequence."""

from __future__ import annotations

from typing import Any


class StopStrings:
    """Detokenises one request's output as it grows, so that a string split over tokens is found where it completes."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tail = ""
        self._keep = max(map(len, stop)) - 1
        # Decoding starts at a token already read, because tokenizers drop or add a space at the start of a text.
        self._context = self._read = 0

    def found(self, token_ids: list[int]) -> str | None:
        """The stop string the text of token_ids contains since the last call, which had one token less; else None."""
        before = self._decode(token_ids[self._context : self._read])
        now = self._decode(token_ids[self._context :])
        text = self._tail + now[len(before) :]
        hit = next((s for s in self._stop if s in text), None)
        # A trailing replacement character is the start of a character that later tokens complete.
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self._context, self._read = self._read, len(token_ids)
            self._tail = text[-self._keep :] if self._keep else ""
        return hit

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
