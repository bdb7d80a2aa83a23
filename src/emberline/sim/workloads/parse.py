"""parse_workload: reads a workload from a command line: a trace file, or a kind with settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from emberline.core.errors import InvalidRequest
from emberline.sim.workloads.agents import AgentWorkload
from emberline.sim.workloads.arrivals import ArrivalRate, BurstRate, ConstantRate, DiurnalRate
from emberline.sim.workloads.requests import RequestWorkload, Workload
from emberline.sim.workloads.traces import read_trace

Settings = dict[str, float]
WHOLE_NUMBERS = ("shared", "shared_prompts", "sessions", "turns", "systems", "system")
EXAMPLE = "poisson:rate=4,seconds=600,prompt=1000,output=200"


def parse_workload(text: str) -> Workload:
    """Return the workload that `text` describes. Raises InvalidRequest if it is malformed.

    `text` is KIND:NAME=NUMBER,..., or the path of a trace file, with `,speed=2` after it to replay it twice as fast."""
    kind, colon, rest = text.partition(":")
    if colon and kind in KINDS:
        allowed, build = KINDS[kind]
        settings = _parse_settings(rest, allowed)
        return build(settings)
    path, _, rest = text.partition(",")
    if not path or not Path(path).exists():
        kinds = ", ".join(KINDS)
        raise InvalidRequest(
            f"the workload {text[:200]!r} is neither a file nor one of the kinds {kinds}",
            param="workload",
            hint=f"write {EXAMPLE}, or name a trace file",
        )
    return read_trace(Path(path), speed=_parse_settings(rest, {"speed": 1.0})["speed"])


def _parse_settings(text: str, allowed: Mapping[str, float]) -> Settings:
    """Return all settings, with values from a text such as a=1,b=2 or else the defaults in `allowed`.

    Raises InvalidRequest for an unknown or repeated setting, or a value that is not valid."""
    settings, given = dict(allowed), set[str]()
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition("=")
        if name not in allowed:
            known = ", ".join(allowed)
            raise InvalidRequest(
                f"the workload has no setting {name[:100]!r}", param=name[:100], hint=f"its settings are {known}"
            )
        if name in given:
            raise InvalidRequest(f"the workload has the setting {name} twice", param=name, hint="write it once")
        given.add(name)
        settings[name] = _parse_number(name, value)
    return settings


def _parse_number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} is {text[:100]!r}; it must be a finite number", param=name)
    if name in WHOLE_NUMBERS and not number.is_integer():
        raise InvalidRequest(f"{name} is {text[:100]!r}; it must be a whole number", param=name)
    return number


_REQUESTS = {"seconds": 600.0, "prompt": 1000.0, "output": 200.0, "spread": 0.0, "shared": 0.0, "shared_prompts": 1.0}


def _build_requests(arrivals: ArrivalRate, settings: Settings) -> RequestWorkload:
    return RequestWorkload(
        arrivals,
        settings["seconds"],
        settings["prompt"],
        settings["output"],
        settings["spread"],
        int(settings["shared"]),
        int(settings["shared_prompts"]),
    )


def _build_agents(settings: Settings) -> AgentWorkload:
    turns = int(settings["turns"])
    return AgentWorkload(
        num_sessions=int(settings["sessions"]),
        systems=int(settings["systems"]),
        system_tokens=(int(settings["system"]), int(settings["system"])),
        turns=(turns, turns),
        user_tokens=settings["user"],
        reply_tokens=settings["output"],
        spread=settings["spread"],
        think_seconds=settings["think"],
        over_seconds=settings["seconds"],
    )


# The settings with their defaults, and the function that builds the workload, by name.
KINDS: dict[str, tuple[Mapping[str, float], Callable[[Settings], Workload]]] = {
    "poisson": ({"rate": 1.0, **_REQUESTS}, lambda s: _build_requests(ConstantRate(s["rate"]), s)),
    "bursts": (
        {"rate": 1.0, "factor": 5.0, "every": 300.0, "burst": 30.0, **_REQUESTS},
        lambda s: _build_requests(BurstRate(s["rate"], s["factor"], s["every"], s["burst"]), s),
    ),
    "diurnal": (
        {"rate": 1.0, "peak": 1.7, "day": 86_400.0, **_REQUESTS, "seconds": 86_400.0},
        lambda s: _build_requests(DiurnalRate(s["rate"], s["peak"], s["day"]), s),
    ),
    "agents": (
        {
            "sessions": 160.0,
            "systems": 8.0,
            "system": 3072.0,
            "turns": 15.0,
            "user": 220.0,
            "output": 120.0,
            "spread": 0.7,
            "think": 8.0,
            "seconds": 240.0,
        },
        _build_agents,
    ),
}
