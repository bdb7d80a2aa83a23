"""LatencyTargets: the latencies that a service promises, parsed from text such as ttft_p90=0.5,itl_p90=50ms."""

from __future__ import annotations

import re
from dataclasses import dataclass

from emberline.core.errors import InvalidRequest

MAX_TTFT_S, MAX_ITL_S = 600.0, 60.0  # a larger value is probably milliseconds without the unit
EXAMPLE = "ttft_p90=500ms,itl_p90=50ms"
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ms|s)?")


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    ttft_p90: float  # seconds from a request to its first token, of 90 % of requests
    itl_p90: float  # seconds between two tokens, of 90 % of tokens

    @staticmethod
    def parse(text: str, param: str = "slo") -> LatencyTargets:
        """Parse text such as ttft_p90=0.5,itl_p90=50ms. Numbers without a unit are seconds.

        Raises InvalidRequest if a target is missing, unknown, given twice or not a valid duration."""
        found: dict[str, float] = {}
        limits = {"ttft_p90": MAX_TTFT_S, "itl_p90": MAX_ITL_S}
        for word in filter(None, (each.strip() for each in text.split(","))):
            name, _, value = (part.strip() for part in word.partition("="))
            if name not in limits or name in found:
                problem = "given twice" if name in found else "unknown"
                message = f"{param} has the {problem} target {name[:40]!r}; the targets are ttft_p90 and itl_p90"
                raise InvalidRequest(message, param=param, hint=f"write {EXAMPLE}")
            found[name] = _parse_seconds(name, value, limits[name], param)
        if missing := [name for name in limits if name not in found]:
            message = f"{param} is {text[:80]!r} and has no {' and no '.join(missing)}"
            raise InvalidRequest(message, param=param, hint=f"write {EXAMPLE}")
        return LatencyTargets(**found)

    def __str__(self) -> str:
        return f"ttft_p90={self.ttft_p90 * 1e3:g}ms,itl_p90={self.itl_p90 * 1e3:g}ms"


def _parse_seconds(name: str, text: str, limit_s: float, param: str) -> float:
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * (1e-3 if match[2] == "ms" else 1.0) if match is not None else 0.0
    if not 0 < seconds <= limit_s:
        message = f"{name} is {text[:40]!r}; it must be a duration above 0 and at most {limit_s:g} s"
        raise InvalidRequest(message, param=param, hint="numbers without a unit are seconds: write 0.5, 0.5s or 500ms")
    return seconds
