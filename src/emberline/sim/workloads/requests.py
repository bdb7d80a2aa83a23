"""RequestWorkload: single requests that arrive at random times, with prompts that may share their beginning."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from emberline.core.errors import InvalidRequest
from emberline.sim.prompt import PromptSegment, SimPromptBuilder
from emberline.sim.sessions import SimSession, SingleRequest
from emberline.sim.workloads.arrivals import ArrivalRate, draw_arrivals

MAX_MEDIAN_TOKENS = 1 << 31  # of prompts and replies; more fit no KV cache
MAX_SPREAD = 5.0  # the 90th percentile is 600 times the median


class Workload(Protocol):
    def sessions(self, seed: int) -> Iterable[SimSession]:
        """Return the sessions in the order of their start. Equal seeds give equal sessions."""
        ...


@dataclass(frozen=True, slots=True)
class RequestWorkload:
    arrivals: ArrivalRate
    seconds: float  # time in which requests arrive
    prompt_tokens: float = 1000.0  # median
    output_tokens: float = 200.0  # median
    spread: float = 0.0  # sigma of both, which are log-normal; 0: all are equal
    shared_tokens: int = 0  # tokens with which every prompt begins, in addition to `prompt_tokens`
    shared_prompts: int = 1  # number of different such beginnings, chosen at random

    def __post_init__(self) -> None:
        for name, low in (("seconds", 0.0), ("prompt_tokens", 0.5), ("output_tokens", 0.5)):
            if not getattr(self, name) > low:
                label = name.removesuffix("_tokens")
                raise InvalidRequest(f"{label} is {getattr(self, name):g}; it must be above {low:g}", param=label)
        check_median_tokens("prompt", self.prompt_tokens)
        check_median_tokens("output", self.output_tokens)
        check_spread(self.spread)
        if self.shared_tokens < 0 or self.shared_prompts < 1:
            raise InvalidRequest(
                f"shared is {self.shared_tokens} and shared_prompts is {self.shared_prompts}; they must be at least 0"
                " and 1",
                param="shared",
            )

    def sessions(self, seed: int) -> Iterator[SingleRequest]:
        rng = random.Random(seed)
        for number, time in enumerate(draw_arrivals(self.arrivals, self.seconds, rng)):
            segments = [PromptSegment(f"{seed}/request-{number}", self._draw(rng, self.prompt_tokens))]
            if self.shared_tokens:
                shared = f"{seed}/shared-{rng.randrange(self.shared_prompts)}"
                segments.insert(0, PromptSegment(shared, self.shared_tokens))
            yield make_single_request(request_id(number), time, segments, self._draw(rng, self.output_tokens))

    def _draw(self, rng: random.Random, median: float) -> int:
        return max(1, round(median * rng.lognormvariate(0.0, self.spread) if self.spread else median))


def check_median_tokens(param: str, tokens: float) -> None:
    if not tokens <= MAX_MEDIAN_TOKENS:
        raise InvalidRequest(f"{param} is {tokens:g}; it must be at most {MAX_MEDIAN_TOKENS}", param=param)


def check_spread(spread: float) -> None:
    if not 0 <= spread <= MAX_SPREAD:
        raise InvalidRequest(f"spread is {spread:g}; it must be from 0 to {MAX_SPREAD:g}", param="spread")


def request_id(number: int) -> str:
    return f"request-{number}"


def reply_key(number: int) -> str:
    """Return the key of the reply to the request with this number, for prompts that continue it."""
    return f"{request_id(number)}/reply"


def make_single_request(
    name: str, starts_at: float, segments: Iterable[PromptSegment], output_tokens: int
) -> SingleRequest:
    prompt = SimPromptBuilder()
    for segment in segments:
        prompt.add(segment)
    return SingleRequest(starts_at, prompt.build_request(name, PromptSegment(f"{name}/reply", output_tokens)))
