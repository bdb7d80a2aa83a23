"""DraftSwitch: turns drafting on and off for each size of batch, by the measured tokens per second of both.

The estimate of `choose_lengths` leaves out what drafting costs the host: proposing tokens, and waiting for each result
before the next step is planned. On a loaded server that can be more than drafts gain. So, for each range of batch
sizes, short periods with and without drafts are measured, and the faster way is used in between."""

from __future__ import annotations

from dataclasses import dataclass

BASE_STEPS = 8  # without drafts, to measure what drafts must beat
TRIAL_STEPS = 16  # with drafts, to see whether they do
ON_STEPS = 512  # with drafts, before both are measured again
MIN_OFF_STEPS, MAX_OFF_STEPS = 256, 1 << 14  # without drafts, before they are tried again; twice as long each time
# A period with drafts ends early, after this many steps, if its rate is below this share of the rate without drafts.
MIN_STEPS, CLEAR_LOSS = 4, 0.85
SKIPPED_STEPS = 2  # at the beginning of a period, while steps of the other kind are still running


@dataclass(slots=True)
class SwitchPeriod:
    """The tokens and seconds of consecutive steps, all with or all without drafts, for one range of batch sizes."""

    is_on: bool
    length: int  # in steps
    steps: int = -SKIPPED_STEPS  # recorded so far; those below 0 are not counted
    tokens: int = 0
    seconds: float = 0.0


class DraftSwitch:
    def __init__(self, *, starts_on: bool = True) -> None:
        """`starts_on`: whether the first steps of each size of batch have drafts, before any were measured without."""
        self._starts_on = starts_on
        self._periods: dict[int, SwitchPeriod] = {}  # by size of the batch
        self._base_rates: dict[int, float] = {}  # tokens per second without drafts
        self._off_steps: dict[int, int] = {}  # length of the next period without drafts, if drafts do not pay

    def is_on(self, requests: int) -> bool:
        """Return whether a step with this number of requests should have drafts."""
        return self._period(requests.bit_length()).is_on

    def is_measuring(self, requests: int) -> bool:
        """Return whether steps with this number of requests have no drafts for a short time, to be measured."""
        period = self._period(requests.bit_length())
        return not period.is_on and period.length == BASE_STEPS

    def record(self, requests: int, tokens: int, seconds: float) -> None:
        """Record a step: its number of requests, the tokens it sampled, and the seconds since the previous result."""
        size = requests.bit_length()
        period = self._period(size)
        period.steps += 1
        if period.steps > 0:
            period.tokens += tokens
            period.seconds += seconds
        if period.steps >= period.length or self._is_clear_loss(size, period):
            self._periods[size] = self._next_period(size, period)

    def _period(self, size: int) -> SwitchPeriod:
        if size not in self._periods:
            self._periods[size] = SwitchPeriod(self._starts_on, TRIAL_STEPS if self._starts_on else BASE_STEPS)
        return self._periods[size]

    def _is_clear_loss(self, size: int, period: SwitchPeriod) -> bool:
        if not period.is_on or period.steps < MIN_STEPS or size not in self._base_rates:
            return False
        return period.tokens < CLEAR_LOSS * self._base_rates[size] * period.seconds

    def _next_period(self, size: int, ended: SwitchPeriod) -> SwitchPeriod:
        rate = ended.tokens / ended.seconds if ended.seconds else 0.0
        if not ended.is_on:
            self._base_rates[size] = rate
            return SwitchPeriod(True, TRIAL_STEPS)
        if size not in self._base_rates:
            return SwitchPeriod(False, BASE_STEPS)
        if rate > self._base_rates[size]:
            self._off_steps.pop(size, None)
            return SwitchPeriod(True, ON_STEPS) if ended.length == TRIAL_STEPS else SwitchPeriod(False, BASE_STEPS)
        self._off_steps[size] = min(2 * self._off_steps.get(size, MIN_OFF_STEPS // 2), MAX_OFF_STEPS)
        return SwitchPeriod(False, self._off_steps[size])
