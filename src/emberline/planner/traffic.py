"""Traffic: how many requests arrive, how long their prompts and replies are, and what prompts have in common."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from emberline.core.errors import InvalidRequest

EXAMPLE = "rate=8,in=4096,out=256"
MAX_SPREAD = 2.0
SAMPLED_REQUESTS = 2000  # drawn from a distribution of lengths
MAX_TOKENS = 10_000_000
# Name: smallest and largest value, and whether it must be given.
_FIELDS = {
    "rate": (1e-3, 1e6, True),
    "in": (1, MAX_TOKENS, True),
    "out": (1, MAX_TOKENS, True),
    "spread": (0.0, MAX_SPREAD, False),
    "prefix": (0.0, 0.99, False),
}


@dataclass(frozen=True)  # without slots, for cached properties
class Traffic:
    rate: float  # requests per second
    lengths: tuple[tuple[int, int], ...]  # tokens of prompt and reply, of sampled requests
    prefix_share: float = 0.0  # of the prompt tokens, which earlier requests had too
    description: str = ""
    trace: str = ""  # file with the requests; empty: arrivals are random

    @staticmethod
    def parse(text: str, seed: int) -> Traffic:
        """Parse text such as rate=8,in=4096,out=256. Raises InvalidRequest.

        `spread`: sigma of log-normal lengths with these means. `prefix`: share of a prompt that others have too."""
        values = _parse_fields(text)
        rng, spread = random.Random(seed), values.get("spread", 0.0)

        def draw(mean: float) -> int:
            return max(1, round(mean * math.exp(rng.gauss(-spread * spread / 2, spread)))) if spread else round(mean)

        count = SAMPLED_REQUESTS if spread else 1
        lengths = tuple((draw(values["in"]), draw(values["out"])) for _ in range(count))
        return Traffic(values["rate"], lengths, values.get("prefix", 0.0), text)

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
        """The mean context of decoding requests, over time: long replies decode for longer."""
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
        """Prompt and output tokens together."""
        return self.rate * (self.mean_prompt + self.mean_output)


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
