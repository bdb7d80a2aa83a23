"""Seam: where another stream goes on with what was said. What it says again of the last words is taken out: who was
given them as the beginning of its answer repeats at most the space at their end, or (`prefix`) all of them; who was
only told to go on may begin again anywhere."""

from __future__ import annotations

from collections.abc import Iterable

from emberline.gateway.dialects.prefill import Prefill

LOOK = 400  # characters back from the end; besides, it may begin again at the very beginning
LEAST = 3  # letters: less is no repetition


class Seam:
    def __init__(self, sent_text: str, prefill: Prefill) -> None:
        self._echoes = tuple(sorted(set(_echoes(sent_text, prefill)), key=len, reverse=True))
        self._held = ""  # is an echo so far

    def push(self, text: str) -> str:
        """What of it is new; "" while it may all be an echo."""
        if not self._echoes:
            return text
        self._held += text
        if any(len(candidate) > len(self._held) and candidate.startswith(self._held) for candidate in self._echoes):
            return ""
        return self.end()

    def end(self) -> str:
        """No more text comes, for now: what was held back and is new."""
        held, repetitions = self._held, self._echoes
        self._held, self._echoes = "", ()
        repetition = next((candidate for candidate in repetitions if held.startswith(candidate)), None)
        if repetition is None and any(candidate.startswith(held) for candidate in repetitions):
            return ""  # it ended while it repeated
        return held[len(repetition or "") :]


def _echoes(sent_text: str, prefill: Prefill) -> Iterable[str]:
    text = sent_text.rstrip()
    space = sent_text[len(text) :]
    yield from (space[:end] for end in range(1, len(space) + 1))
    if prefill == "prefix" and text:
        yield from (text + space[:end] for end in range(len(space) + 1))
    if prefill == "":
        for start in (0, *range(max(1, len(text) - LOOK), len(text))):
            is_word = start == 0 or (sent_text[start - 1].isspace() and not sent_text[start].isspace())
            if is_word and len(text) - start >= LEAST:
                yield from (text[start:], sent_text[start:])
