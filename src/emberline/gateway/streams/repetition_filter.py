"""Removes repeated text from the beginning of a continuation: text that the client already received.

A provider with assistant prefill continues a partial assistant message. It repeats only trailing whitespace or, if its
kind of prefill is "prefix", the whole text. A provider that was only instructed to continue may restart at any earlier
word.
"""

from __future__ import annotations

from collections.abc import Iterable

from emberline.gateway.core.assistant_prefill import AssistantPrefill

MAX_LOOKBACK_CHARACTERS = 400  # before the end; a restart at the very beginning is recognised too
MIN_REPEATED_CHARACTERS = 3  # shorter matches are taken for new text


class RepetitionFilter:
    """Removes repetitions of `sent_text` from the beginning of the text that continues it."""

    def __init__(self, sent_text: str, prefill: AssistantPrefill) -> None:
        self._repetitions = tuple(sorted(set(_iter_possible_repetitions(sent_text, prefill)), key=len, reverse=True))
        self._held = ""  # received text that may still turn out to be a repetition

    def push(self, text: str) -> str:
        """Return the text that the client has not received yet, or "" while `text` may still be a repetition."""
        if not self._repetitions:
            return text
        self._held += text
        if any(
            len(candidate) > len(self._held) and candidate.startswith(self._held) for candidate in self._repetitions
        ):
            return ""
        return self.end()

    def end(self) -> str:
        """Return the remaining text that the client has not received before; called when no more text follows."""
        held, repetitions = self._held, self._repetitions
        self._held, self._repetitions = "", ()
        repetition = next((candidate for candidate in repetitions if held.startswith(candidate)), None)
        if repetition is None and any(candidate.startswith(held) for candidate in repetitions):
            return ""  # the continuation ended within the repetition
        return held[len(repetition or "") :]


def _iter_possible_repetitions(sent_text: str, prefill: AssistantPrefill) -> Iterable[str]:
    text = sent_text.rstrip()
    space = sent_text[len(text) :]
    yield from (space[:end] for end in range(1, len(space) + 1))
    if prefill == "prefix" and text:
        yield from (text + space[:end] for end in range(len(space) + 1))
    if prefill == "":
        for start in (0, *range(max(1, len(text) - MAX_LOOKBACK_CHARACTERS), len(text))):
            is_word = start == 0 or (sent_text[start - 1].isspace() and not sent_text[start].isspace())
            if is_word and len(text) - start >= MIN_REPEATED_CHARACTERS:
                yield from (text[start:], sent_text[start:])
