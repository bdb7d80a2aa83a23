"""Parses tracked streams, and builds the requests by which a different worker continues them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emberline.core.handoff import NO_DRAFTS, DraftCounts, Handoff, TokenGroup


@dataclass(frozen=True)
class Group:
    said: TokenGroup
    events: bytes
    cached: int | None = None
    drafts: DraftCounts | None = None


def groups_of(stream: bytes) -> list[Group]:
    """Split a stream into its token groups and check that nothing stands between them."""
    found, cached, drafts = [], None, None
    while stream:
        line, _, stream = stream.partition(b"\n\n")
        if line.startswith(b": cached "):
            cached = int(line.split()[-1])
            continue
        if line.startswith(b": drafts "):
            drafts = DraftCounts(*map(int, line.split()[2:]))
            continue
        assert line.startswith(b": said "), line
        size = int(line.split()[4])
        events, stream = stream[:size], stream[size:]
        assert len(events) == size and b"\n\n:" not in events and (not events or events.endswith(b"\n\n"))
        found.append(Group(TokenGroup.from_comment(line), events, cached, drafts))
        cached = drafts = None
    return found


def events_of(groups: Sequence[Group]) -> bytes:
    return b"".join(group.events for group in groups)


def name_of(events: bytes) -> tuple[str, int | None]:
    """Return the id and the creation time in the first event of a reply."""
    data = next(line for line in events.splitlines() if line.startswith(b"data: "))
    told = json.loads(data.removeprefix(b"data: "))
    inner = told.get("message") or told.get("response") or told
    return inner["id"], inner.get("created", inner.get("created_at"))


def envelope(
    path: str,
    body: Any,
    told: Sequence[Group] = (),
    name: tuple[str | None, int | None] = (None, None),
    source: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    cached = [group.cached for group in told if group.cached is not None]
    started = any(group.events for group in told)
    said = tuple(group.said for group in told)
    drafts = [NO_DRAFTS, *(group.drafts for group in told if group.drafts is not None)]
    handoff = Handoff(said, started, cached[-1] if cached else None, source, drafts[-1]).as_dict()
    named = {"id": name[0], "created": name[1]}
    return {"path": path, "body": body, "seed": 7, **named, "handoff": handoff, "timeout": 30.0, **fields}
