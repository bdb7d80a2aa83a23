"""Pacer: how many tokens of prompts a step may carry, so that streams in the same step get their next token in time.

It learns two costs from the steps that were run: what a step takes without any prompt, and what a token of a prompt
adds. Both drift (more streams, longer contexts), so recent steps count more. No torch, no clock.
"""

from __future__ import annotations

from emberline.engine.gpu.shape import GRAIN, beside

RECENT = 0.2  # the weight of the newest step
LEAST = 64  # a step always carries so much, or prompts would starve when the target cannot be met anyway


class Pacer:
    def __init__(self, target: float) -> None:
        """`target`: seconds between two tokens of a stream."""
        self.target = target
        self._base, self._per_token = 0.005, 25e-6  # a guess that steps correct

    def allowance(self, streams: int) -> int | None:
        """Tokens of prompts for the next step; None: as many as there are, since nobody waits for a next token."""
        if not streams:
            return None
        room = (self.target - self._base) / self._per_token
        streams = beside(streams)
        return max(LEAST, (streams + int(room)) // GRAIN * GRAIN - streams)

    def learn(self, prompt_tokens: int, seconds: float) -> None:
        if prompt_tokens == 0:
            self._base += RECENT * (seconds - self._base)
        elif prompt_tokens >= LEAST:
            slope = max(seconds - self._base, 0.1 * seconds) / prompt_tokens
            self._per_token += RECENT * (slope - self._per_token)
