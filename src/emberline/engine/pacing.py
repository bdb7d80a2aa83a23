"""PromptPacer: limits the prompt tokens of a step, so that streams meet the inter-token latency target.

It estimates two costs from the steps that were run: the time of a step without prompts, and the time that each
prompt token adds. Both change with the number of streams and their contexts, so recent steps have more weight. This
module needs neither torch nor a clock."""

from __future__ import annotations

from collections.abc import Sequence

from emberline.core.request import Request
from emberline.engine.gpu.shape import TOKEN_GRAIN

NEWEST_STEP_WEIGHT = 0.2  # weight of the newest step in the estimates
MIN_PROMPT_TOKENS = 64  # always allowed, so that prompts do not starve when the target cannot be met anyway
LONG_WAIT_TARGETS = 8  # a prompt that has waited for this many targets gets long steps
# One token in TOKENS_PER_LATE_TOKEN may be late, in a long step. Unused ones are saved, up to MAX_LATE_TOKENS, so that
# a burst of prompts gets several long steps in a row. This keeps a margin to the promised 90 % of tokens on time.
TOKENS_PER_LATE_TOKEN = 14
MAX_LATE_TOKENS = 1000
STEPS_PER_STAGE = 8  # into which the prompts that are known are divided, for each stage
MAX_STEPS_OF_STAGES = 32  # into which `max_batch_tokens` tokens of prompts are divided if there are several stages
TAIL_MARGIN = 0.97  # part of the tail that a long step is planned to take, since its cost is an estimate


def max_prompt_tokens(max_batch_tokens: int, planned: int, num_stages: int, prompts: Sequence[Request | None]) -> int:
    """Return how many prompt tokens a step may have besides `planned` tokens of decoding requests.

    With several stages, prompts are computed in more and smaller steps: the stages compute different steps at the same
    time, and wait for the longest. A step then gets about as many prompt tokens as decoding tokens, or an even share of
    the known prompt tokens if that is more. `prompts`: requests whose prompts come next."""
    left = max_batch_tokens - planned
    if num_stages == 1:
        return left
    known = sum(each.num_schedulable for each in prompts if each is not None)
    even, shortest = known // (STEPS_PER_STAGE * num_stages), -(-max_batch_tokens // MAX_STEPS_OF_STAGES)
    return min(left, max(planned, even, shortest), -(-max_batch_tokens // (2 * num_stages)))


class PromptPacer:
    def __init__(self, target: float, tail: float) -> None:
        """`target`: desired seconds between two tokens of a stream.

        `tail`: maximum duration of the few steps that may exceed the target, as a multiple of `target`."""
        self.target, self.tail = target, tail
        self._base_seconds, self._seconds_per_token = 0.005, 25e-6  # initial guesses
        self._allowed_late = 0.0  # number of tokens that may be late
        # Of the step being planned: streams, and prompt tokens that meet the target.
        self._streams, self._on_time_tokens = (
            0,
            0,
        )

    def prompt_token_budget(self, streams: int, waited_seconds: float = 0.0) -> int | None:
        """Return how many prompt tokens the next step may have; None: no limit, since no stream is open.

        `waited_seconds`: seconds that the first waiting prompt has waited."""
        self._streams, self._on_time_tokens = streams, self._prompt_tokens_within(streams, self.target)
        if not streams:
            return None
        self._allowed_late = min(self._allowed_late + streams / TOKENS_PER_LATE_TOKEN, max(MAX_LATE_TOKENS, streams))
        is_long = waited_seconds > LONG_WAIT_TARGETS * self.target and self._allowed_late >= streams
        return (
            max(self._on_time_tokens, self._prompt_tokens_within(streams, TAIL_MARGIN * self.tail * self.target))
            if is_long
            else self._on_time_tokens
        )

    def record_plan(self, prompt_tokens: int) -> None:
        """Record how many prompt tokens were planned for the step."""
        if self._streams and prompt_tokens > self._on_time_tokens:
            self._allowed_late -= self._streams

    def _prompt_tokens_within(self, streams: int, seconds: float) -> int:
        """Return how many prompt tokens fit into a step of this length."""
        tokens = (seconds - self._base_seconds) / self._seconds_per_token
        return max(MIN_PROMPT_TOKENS, (streams + int(tokens)) // TOKEN_GRAIN * TOKEN_GRAIN - streams)

    def record_step_time(self, prompt_tokens: int, seconds: float) -> None:
        """Update the cost estimates with the duration of a step that was run."""
        if prompt_tokens == 0:
            self._base_seconds += NEWEST_STEP_WEIGHT * (seconds - self._base_seconds)
        elif prompt_tokens >= MIN_PROMPT_TOKENS:
            slope = max(seconds - self._base_seconds, 0.1 * seconds) / prompt_tokens
            self._seconds_per_token += NEWEST_STEP_WEIGHT * (slope - self._seconds_per_token)
