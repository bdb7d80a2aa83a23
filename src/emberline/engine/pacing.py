"""Prompt pacing: how many prompt tokens a step computes, and whether decoding requests ("streams") wait for them.

- NoPacing: as many prompt tokens as a step may have (the default on a CPU).
- PromptBursts: prompts run in bursts during which streams wait, and nine of ten tokens come at the speed of steps
  without prompts (the default on a GPU).
- TargetPacing: chunks are sized so that streams meet a target that the operator has set.

The last two estimate two costs from the steps that were run: the time of a step without prompts, and the time that
each prompt token adds. Both change with the number of streams and their contexts, so recent steps have more weight.
This module needs neither torch nor a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Protocol

from emberline.core.engine_config import SchedulerConfig
from emberline.core.request import Request
from emberline.engine.admission import WaitingQueue
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

# Prompt bursts. The values are those with the best first tokens of an open loop of long prompts near the limit of an
# H200, of all that kept nine of ten tokens at the speed of steps without prompts (docs/log.md).
STREAM_TOKENS_PER_LATE_TOKEN = 10.6  # more than ten: with many streams, steps between bursts are late too
MAX_SAVED_LATE_TOKENS = 1000  # that are saved while no prompts come, for a burst of them
ON_TIME_STEP_SECONDS = 0.016  # a step of this length delays no token noticeably
ON_TIME_BASE_STEPS = 1.15  # nor does one of this many times the length of a step without prompts
BURST_STEP_SECONDS = 0.055  # at most, of a step in a burst: a new prompt waits for the steps that are planned
BURST_STEP_BASE_STEPS = 3  # of this many steps without prompts, if that is longer: each reads all weights once
MAX_BURST_SECONDS = 0.42
MAX_PROMPT_WAIT_SECONDS = 0.5  # a prompt that has waited this long starts a burst although streams had one just now


@dataclass(frozen=True, slots=True)
class PromptBacklog:
    """The prompts that a step may compute: chunks of running requests, then waiting requests."""

    chunks: Sequence[Request]
    waiting: WaitingQueue
    num_startable: int  # waiting requests that may start before a running one ends
    now: float

    @property
    def next(self) -> Request | None:
        """The request whose prompt is computed next."""
        return self.chunks[0] if self.chunks else self.waiting.first_unblocked()

    @property
    def waited_seconds(self) -> float:
        """Seconds that the next prompt has waited for its first token."""
        first = self.next
        return self.now - first.arrival if first is not None and first.first_token_at is None else 0.0

    def exceeds(self, tokens: int) -> bool:
        """Return whether more than `tokens` prompt tokens are known that are not planned yet."""
        startable = islice(self.waiting, self.num_startable) if self.waiting.first_unblocked() else ()
        counts = (each.num_schedulable for each in chain(self.chunks, startable))
        return any(total > tokens for total in accumulate(counts))


def max_prompt_tokens(max_batch_tokens: int, planned: int, num_stages: int, prompts: PromptBacklog) -> int:
    """Return how many prompt tokens a step may have besides `planned` tokens of decoding requests.

    With several stages, prompts are computed in more and smaller steps: the stages compute different steps at the same
    time, and wait for the longest. A step then gets about as many prompt tokens as decoding tokens, or an even share of
    the known prompt tokens if that is more."""
    left = max_batch_tokens - planned
    if num_stages == 1:
        return left
    first = prompts.waiting.first_unblocked()
    known = sum(each.num_schedulable for each in prompts.chunks) + (first.num_schedulable if first else 0)
    even, shortest = known // (STEPS_PER_STAGE * num_stages), -(-max_batch_tokens // MAX_STEPS_OF_STAGES)
    return min(left, max(planned, even, shortest), -(-max_batch_tokens // (2 * num_stages)))


class PromptPacing(Protocol):
    """Decides in each step about prompt tokens and streams. Calls come in the order of the methods."""

    def streams_wait(self, streams: int, prompts: PromptBacklog) -> bool:
        """Return whether the next step computes prompts only, if it can compute any."""
        ...

    def max_prompt_tokens(self, streams: int, waited_seconds: float) -> int | None:
        """Return how many prompt tokens the next step may have; None: as many as a step may have tokens."""
        ...

    def record_plan(self, prompt_tokens: int) -> None:
        """Record how many prompt tokens were planned for the step."""
        ...

    def record_step_time(self, prompt_tokens: int, seconds: float) -> None:
        """Update the cost estimates with the duration of a step that was run."""
        ...


def make_pacing(config: SchedulerConfig, num_stages: int) -> PromptPacing:
    if config.itl_target_ms:
        return TargetPacing(config.itl_target_ms / 1e3, config.itl_tail)
    # With several stages a stream's next token is computed while other steps run, which prompts do not delay alike.
    return PromptBursts() if config.prompt_bursts and num_stages == 1 else NoPacing()


class NoPacing:
    def streams_wait(self, streams: int, prompts: PromptBacklog) -> bool:
        return False

    def max_prompt_tokens(self, streams: int, waited_seconds: float) -> int | None:
        return None

    def record_plan(self, prompt_tokens: int) -> None: ...

    def record_step_time(self, prompt_tokens: int, seconds: float) -> None: ...


class StepTimeEstimate:
    """Estimates the time of a step from its prompt tokens."""

    def __init__(self) -> None:
        self.base_seconds, self.seconds_per_token = 0.005, 25e-6  # initial guesses

    def prompt_tokens_within(self, streams: int, seconds: float) -> int:
        """Return how many prompt tokens fit into a step of this length; 0 if it is too short for any."""
        tokens = (seconds - self.base_seconds) / self.seconds_per_token
        grains = (streams + int(tokens)) // TOKEN_GRAIN * TOKEN_GRAIN
        return max(0, grains - streams)

    def record(self, prompt_tokens: int, seconds: float) -> None:
        if prompt_tokens == 0:
            self.base_seconds += NEWEST_STEP_WEIGHT * (seconds - self.base_seconds)
        elif prompt_tokens >= MIN_PROMPT_TOKENS:
            slope = max(seconds - self.base_seconds, 0.1 * seconds) / prompt_tokens
            self.seconds_per_token += NEWEST_STEP_WEIGHT * (slope - self.seconds_per_token)


class PromptBursts:
    """Runs prompts in bursts. Streams wait in all steps of a burst but the last, so each has one late token.

    A late token is paid for by STREAM_TOKENS_PER_LATE_TOKEN tokens that streams got on time, in the steps since the
    last burst or earlier. Until a burst is paid for, steps are short, with few prompt tokens."""

    def __init__(self) -> None:
        self._costs = StepTimeEstimate()
        self._late_tokens = float(MAX_SAVED_LATE_TOKENS)  # that streams may have
        self._burst_seconds = 0.0  # of the prompts planned in this burst; 0: no burst
        self._late_streams = 0  # that this burst has delayed so far
        # Of the step being planned:
        self._streams, self._max_tokens, self._is_burst_step, self._ends_burst = 0, 0, False, False

    @property
    def _on_time_tokens(self) -> int:
        seconds = max(ON_TIME_STEP_SECONDS, ON_TIME_BASE_STEPS * self._costs.base_seconds)
        return self._costs.prompt_tokens_within(self._streams, seconds)

    def streams_wait(self, streams: int, prompts: PromptBacklog) -> bool:
        self._streams = streams
        self._is_burst_step = prompts.exceeds(self._on_time_tokens) and self._may_delay_streams(prompts)
        if not self._is_burst_step:
            self._max_tokens = self._on_time_tokens
            return False
        self._max_tokens = self._choose_burst_step_tokens(prompts.next)
        self._ends_burst = self._burst_seconds >= MAX_BURST_SECONDS or not prompts.exceeds(self._max_tokens)
        return not self._ends_burst

    def _choose_burst_step_tokens(self, first: Request | None) -> int:
        """Return the prompt tokens of a step of a burst: a power of two, since matrix products waste least then.

        A long step ends with the first prompt, whose token need not wait for others."""
        seconds = max(BURST_STEP_SECONDS, BURST_STEP_BASE_STEPS * self._costs.base_seconds)
        most = 1 << (int(seconds / self._costs.seconds_per_token).bit_length() - 1)
        if first is not None and most // 2 <= first.num_schedulable < most:
            return first.num_schedulable
        return max(most, MIN_PROMPT_TOKENS)

    def _may_delay_streams(self, prompts: PromptBacklog) -> bool:
        is_paid = self._burst_seconds > 0 or self._late_tokens >= self._streams
        return is_paid or prompts.waited_seconds > MAX_PROMPT_WAIT_SECONDS

    def max_prompt_tokens(self, streams: int, waited_seconds: float) -> int | None:
        return self._max_tokens if self._streams else None

    def record_plan(self, prompt_tokens: int) -> None:
        if not self._is_burst_step or not self._streams or prompt_tokens <= self._on_time_tokens:
            self._save_late_tokens()
            self._burst_seconds, self._late_streams = 0.0, 0
            return
        # The requests that got their first token in this burst are streams that wait too.
        newly_late = max(0, self._streams - self._late_streams)
        self._late_streams += newly_late
        self._late_tokens = max(self._late_tokens - newly_late, -float(self._streams))
        self._burst_seconds += prompt_tokens * self._costs.seconds_per_token
        if self._ends_burst:
            self._save_late_tokens()
            self._burst_seconds, self._late_streams = 0.0, 0

    def _save_late_tokens(self) -> None:
        """Count the tokens that streams get in this step."""
        saved = self._late_tokens + self._streams / STREAM_TOKENS_PER_LATE_TOKEN
        self._late_tokens = min(saved, max(MAX_SAVED_LATE_TOKENS, self._streams))

    def record_step_time(self, prompt_tokens: int, seconds: float) -> None:
        self._costs.record(prompt_tokens, seconds)


class TargetPacing:
    def __init__(self, target: float, tail: float) -> None:
        """`target`: desired seconds between two tokens of a stream.

        `tail`: maximum duration of the few steps that may exceed the target, as a multiple of `target`."""
        self.target, self.tail = target, tail
        self._costs = StepTimeEstimate()
        self._allowed_late = 0.0  # number of tokens that may be late
        # Of the step being planned: streams, and prompt tokens that meet the target.
        self._streams, self._on_time_tokens = 0, 0

    def streams_wait(self, streams: int, prompts: PromptBacklog) -> bool:
        return False

    def max_prompt_tokens(self, streams: int, waited_seconds: float = 0.0) -> int | None:
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

    def _prompt_tokens_within(self, streams: int, seconds: float) -> int:
        return max(MIN_PROMPT_TOKENS, self._costs.prompt_tokens_within(streams, seconds))

    def record_plan(self, prompt_tokens: int) -> None:
        if self._streams and prompt_tokens > self._on_time_tokens:
            self._allowed_late -= self._streams

    def record_step_time(self, prompt_tokens: int, seconds: float) -> None:
        self._costs.record(prompt_tokens, seconds)
