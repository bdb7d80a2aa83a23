"""The part of a router's /cluster/status that the autoscaler reads. Other fields are not checked.

A status that does not have this form must not end the autoscaler: routers and autoscaler are updated at different
times, and the URL may be that of another server."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

Name = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Number = Annotated[float, msgspec.Meta(ge=0, lt=1e18)]


class _StatusRow(TypedDict):
    name: Name
    incarnation: str
    url: NotRequired[str]
    role: str
    models: list[str]
    embedders: NotRequired[list[str]]
    health: Literal["draining", "ready", "starting", "stuck", "lost"]
    asleep: NotRequired[bool]
    open: Count
    open_by_other_routers: Count
    waiting: Count
    max_running: Count
    prefill_tokens: Number
    decode_tokens: Number
    prompt_tokens: Count
    generated_tokens: Count
    answered: Count
    kv_usage: Number
    seconds_since_beat: float
    transfer: dict[str, Any] | None


class _Latency(TypedDict):
    bounds_s: list[Number]
    first_token: list[Count]
    inter_token: list[Count]


class _RouterStatus(TypedDict):
    workers: list[_StatusRow]
    waiting_requests: Count
    waiting_by_model: NotRequired[dict[str, Count]]
    refused: Count
    latency: _Latency


def find_status_problem(document: Any) -> str:
    """Return why a document is not a router's status; empty: it is one."""
    try:
        status = msgspec.convert(document, _RouterStatus)
    except msgspec.ValidationError as error:
        return str(error)
    latency = status["latency"]
    for name in ("first_token", "inter_token"):
        if len(counts := latency[name]) != len(latency["bounds_s"]) + 1:
            return f"latency.{name} has {len(counts)} counts for {len(latency['bounds_s'])} bounds"
    return ""
