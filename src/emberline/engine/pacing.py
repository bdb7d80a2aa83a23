"""Pacer: how many tokens of prompts a step may carry, so that streams in the same step get their next token in time.

It learns two costs from the steps that were run: what a step takes without any prompt, and what a token of a prompt
adds. Both drift (more streams, longer contexts), so recent steps count more. No torch, no clock.
"""

from __future__ import annotations

from emberline.engine.gpu.shape import GRAIN

RECENT = 0.2  # the weight of the newest step
LEAST = 64  # a step always carries so much, or prompts would starve when the target cannot be met anyway
WAITED_TARGETS = 8  # prompts that have waited for so many targets get long steps
# One token of ONE_LATE_OF may come late, in a long step. Those that came in time are saved up to MAX_SAVED_TOKENS, so a
# burst of prompts gets several long steps in a row. That leaves a margin to the nine of ten tokens that are promised.
ONE_LATE_OF = 14
MAX_SAVED_TOKENS = 1000
MARGIN = 0.97  # of the tail that a long step is planned for, since its cost is an estimate


class Pacer:
    def __init__(self, target: float, tail: float) -> None:
        """`target`: seconds between two tokens of a stream; `tail`: targets that a long step may take."""
        self.target, self.tail = target, tail
        self._base, self._per_token = 0.005, 25e-6  # a guess that steps correct
        self._saved = 0.0  # tokens that may be late
        self._streams, self._usual = 0, 0  # of the step that is being planned: tokens of prompts that are in time

    def allowance(self, streams: int, waited: float = 0.0) -> int | None:
        """Tokens of prompts for the next step; None: as many as there are, since nobody waits for a next token.
        `waited`: seconds, of the prompt that is first."""
        self._streams, self._usual = streams, self._room(streams, self.target)
        if not streams:
            return None
        self._saved = min(self._saved + streams / ONE_LATE_OF, max(MAX_SAVED_TOKENS, streams))
        long = waited > WAITED_TARGETS * self.target and self._saved >= streams
        return max(self._usual, self._room(streams, MARGIN * self.tail * self.target)) if long else self._usual

    def planned(self, prompt_tokens: int) -> None:
        """What the step has got."""
        if self._streams and prompt_tokens > self._usual:
            self._saved -= self._streams

    def _room(self, streams: int, seconds: float) -> int:
        room = (seconds - self._base) / self._per_token
        return max(LEAST, (streams + int(room)) // GRAIN * GRAIN - streams)

    def learn(self, prompt_tokens: int, seconds: float) -> None:
        if prompt_tokens == 0:
            self._base += RECENT * (seconds - self._base)
        elif prompt_tokens >= LEAST:
            slope = max(seconds - self._base, 0.1 * seconds) / prompt_tokens
            self._per_token += RECENT * (slope - self._per_token)
