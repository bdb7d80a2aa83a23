"""Traffic: how many requests arrive, how long their prompts and replies are, and what prompts have in common."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from emberline.core.errors import InvalidRequest
from emberline.sim.prompt import PromptSegment
from emberline.sim.workloads.traces import TraceRequest, read_trace

EXAMPLE = "rate=8,in=4096,out=256"
MAX_SPREAD = 2.0
SAMPLED_REQUESTS = 2000  # drawn from a distribution of lengths
MAX_TOKENS = 10_000_000
MAX_PREFIX_SHARE = 0.99
BUSIEST_SECONDS, BUSIEST_REQUESTS = 60.0, 100  # least length of the part of a trace that is planned for
# Name: smallest and largest value, and whether it must be given.
_FIELDS = {
    "rate": (1e-3, 1e6, True),
    "in": (1, MAX_TOKENS, True),
    "out": (1, MAX_TOKENS, True),
    "spread": (0.0, MAX_SPREAD, False),
    "prefix": (0.0, MAX_PREFIX_SHARE, False),
}


@dataclass(frozen=True)  # without slots, for cached properties
class Traffic:
    rate: float  # requests per second
    lengths: tuple[tuple[int, int], ...]  # tokens of prompt and reply, of sampled requests
    prefix_share: float = 0.0  # share of the prompt tokens that are in a prefix that an earlier request had too
    description: str = ""
    replayed: tuple[TraceRequest, ...] = ()  # requests of a trace in the order of time; empty: arrivals are random

    @staticmethod
    def parse(text: str, seed: int) -> Traffic:
        """Parse text such as rate=8,in=4096,out=256, or read the busiest part of a trace. Raises InvalidRequest.

        Optional fields: `spread` is the sigma of log-normal lengths with the means `in` and `out`, and `prefix` the
        share of each prompt that is a prefix which other prompts have too."""
        if text.strip() and "=" not in text:
            return Traffic.read_trace(Path(text))
        values = _parse_fields(text)
        rng, spread = random.Random(seed), values.get("spread", 0.0)

        def draw(mean: float) -> int:
            return max(1, round(mean * math.exp(rng.gauss(-spread * spread / 2, spread)))) if spread else round(mean)

        count = SAMPLED_REQUESTS if spread else 1
        lengths = tuple((draw(values["in"]), draw(values["out"])) for _ in range(count))
        return Traffic(values["rate"], lengths, values.get("prefix", 0.0), text)

    @staticmethod
    def read_trace(path: Path) -> Traffic:
        """Return the busiest part of a trace file, in one of the formats that the simulator reads."""
        if not path.is_file():
            message = f"traffic is {str(path)[:80]!r}, which is neither a file nor fields"
            raise InvalidRequest(message, param="traffic", hint=f"write {EXAMPLE}, or the path of a trace")
        requests = read_trace(path).requests
        busiest = find_busiest_part(requests)
        seconds = busiest[-1].time - busiest[0].time if busiest else 0.0
        if seconds <= 0:
            message = f"{path} has {len(requests)} requests, and no two at different times"
            raise InvalidRequest(message, param="traffic", hint="plan for a trace with more requests")
        lengths = tuple((sum(part.num_tokens for part in each.segments), each.output_tokens) for each in busiest)
        part = f"the busiest {seconds:.3g} s, {len(busiest)} of {len(requests)} requests"
        rate = (len(busiest) - 1) / seconds
        return Traffic(rate, lengths, count_prefix_share(busiest), f"{path.name}: {part}", busiest)

    def with_rate_factor(self, factor: float) -> Traffic:
        return replace(self, rate=self.rate * factor)

    @cached_property
    def mean_prompt(self) -> float:
        return sum(prompt for prompt, _ in self.lengths) / len(self.lengths)

    @cached_property
    def mean_output(self) -> float:
        return sum(output for _, output in self.lengths) / len(self.lengths)

    @cached_property
    def p90_prompt(self) -> int:
        return quantile([prompt for prompt, _ in self.lengths], 0.9)

    @cached_property
    def longest_request(self) -> int:
        return max(prompt + output for prompt, output in self.lengths)

    @cached_property
    def mean_context(self) -> float:
        """The mean context of the requests that decode at any time. Long replies count more: they decode for longer."""
        weighted = sum(output * (prompt + output / 2) for prompt, output in self.lengths)
        return weighted / sum(output for _, output in self.lengths)

    @cached_property
    def mean_prompt_context(self) -> float:
        """The mean number of tokens to which a computed prompt token attends."""
        share = self.prefix_share
        attended = sum(prompt * (1 - share) * prompt * (1 + share) / 2 for prompt, _ in self.lengths)
        return attended / sum(prompt * (1 - share) for prompt, _ in self.lengths)

    @cached_property
    def prompt_variation(self) -> float:
        """The squared coefficient of variation of the prompts' lengths."""
        mean = self.mean_prompt
        return sum((prompt - mean) ** 2 for prompt, _ in self.lengths) / len(self.lengths) / mean**2

    @property
    def tokens_per_second(self) -> float:
        """The prompt and output tokens of the traffic, per second."""
        return self.rate * (self.mean_prompt + self.mean_output)


def find_busiest_part(requests: Sequence[TraceRequest]) -> tuple[TraceRequest, ...]:
    """Return the part of a trace with the most tokens per second: at least a minute and BUSIEST_REQUESTS requests.

    If the trace is shorter than that, return all requests."""
    if len(requests) <= BUSIEST_REQUESTS:
        return tuple(requests)
    sizes = [sum(part.num_tokens for part in each.segments) + each.output_tokens for each in requests]
    best, best_rate, start, tokens = (0, len(requests)), 0.0, 0, 0
    for end in range(1, len(requests) + 1):
        tokens += sizes[end - 1]
        while _is_long_enough(requests, start + 1, end):
            tokens -= sizes[start]
            start += 1
        rate = (
            tokens / (requests[end - 1].time - requests[start].time) if _is_long_enough(requests, start, end) else 0.0
        )
        if rate > best_rate:
            best, best_rate = (start, end), rate
    return tuple(requests[slice(*best)])


def _is_long_enough(requests: Sequence[TraceRequest], start: int, end: int) -> bool:
    is_minute = requests[end - 1].time - requests[min(start, end - 1)].time >= BUSIEST_SECONDS
    return is_minute and end - start >= BUSIEST_REQUESTS


def count_prefix_share(requests: Sequence[TraceRequest]) -> float:
    """Return the share of prompt tokens that belong to a prefix which an earlier prompt had too."""
    known: set[tuple[PromptSegment, ...]] = set()
    shared = total = 0
    for request in requests:
        is_known = True
        for number, part in enumerate(request.segments, 1):
            is_known = is_known and request.segments[:number] in known
            shared += part.num_tokens * is_known
            total += part.num_tokens
        known.update(request.segments[:number] for number in range(1, len(request.segments) + 1))
    return min(MAX_PREFIX_SHARE, shared / total)


def quantile(values: Sequence[int], fraction: float) -> int:
    return sorted(values)[min(int(fraction * len(values)), len(values) - 1)]


def _parse_fields(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for word in filter(None, (each.strip() for each in text.split(","))):
        name, _, value = (part.strip() for part in word.partition("="))
        if name not in _FIELDS or name in found:
            problem = "is given twice" if name in found else "is unknown"
            message = f"traffic {text[:80]!r}: the field {name[:40]!r} {problem}"
            raise InvalidRequest(message, param="traffic", hint=f"fields: {', '.join(_FIELDS)}, such as {EXAMPLE}")
        low, high, _ = _FIELDS[name]
        found[name] = _parse_number(name, value, low, high)
    if missing := [name for name, (_, _, is_needed) in _FIELDS.items() if is_needed and name not in found]:
        message = f"traffic is {text[:80]!r} and has no {', '.join(missing)}"
        raise InvalidRequest(message, param="traffic", hint=f"write {EXAMPLE}, or the path of a trace")
    return found


def _parse_number(name: str, text: str, low: float, high: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not low <= number <= high:
        message = f"traffic: {name} is {text[:40]!r}; it must be a number from {low:g} to {high:g}"
        raise InvalidRequest(message, param="traffic", hint=f"write {EXAMPLE}")
    return number
