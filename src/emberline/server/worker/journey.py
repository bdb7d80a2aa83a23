"""Journey: how a reply came to this worker, besides what its client asked for. The same name, time and seed wherever it
goes on, and what it has said before."""

from __future__ import annotations

import math
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from emberline.core.errors import InvalidRequest
from emberline.core.handoff import Handoff
from emberline.server.exchange import Exchange
from emberline.server.keys import tenant_of
from emberline.trace.span import Span

SEED = "x-emberline-seed"
CREATED = "x-emberline-created"
TRACK = "x-emberline-track"
CHAIN = "x-emberline-chain"
TENANT = "x-emberline-tenant"
LATEST = 1 << 37  # seconds since 1970; calendars end not much later


@dataclass(frozen=True, slots=True)
class Journey:
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # of the reply, without what its protocol puts before it
    created: int = field(default_factory=lambda: int(time.time()))
    seed: int | None = None  # for a call that has none of its own
    timeout: float = math.inf  # seconds that are left
    tracked: bool = False  # the stream tells which tokens its events came from
    chained: bool = False  # the reply tells where the prompt ends, in blocks
    handoff: Handoff = field(default_factory=Handoff)
    span: Span | None = None  # where it is traced
    tenant: str = ""  # cached blocks are shared among the requests of one tenant; "": no keys are configured

    def __post_init__(self) -> None:
        if not 0 <= self.created < LATEST:
            raise InvalidRequest(f"{self.created} is no time at which a reply is made", param="created")

    @staticmethod
    def begun_by(x: Exchange, keyed: bool = False) -> Journey:
        """A router says in headers what it wants to know or to decide. `keyed`: this server has API keys."""
        seed, created = _number(x, SEED), _number(x, CREATED)
        tracked, chained = x.header(TRACK) == "1", x.header(CHAIN) == "1"
        when: dict[str, Any] = {} if created is None else {"created": created}
        tenant = tenant_of(x) if keyed else tenant_by_router(x)
        return Journey(seed=seed, tracked=tracked, chained=chained, span=x.span, tenant=tenant, **when)


def tenant_by_router(x: Exchange, keyed: bool = False) -> str:
    """The tenant as a router names it, if API keys are configured there, or here (`keyed`)."""
    source, _, tenant = x.header(TENANT).partition(" ")
    return tenant if source == "checked" or keyed else ""


def _number(x: Exchange, name: str) -> int | None:
    value = x.header(name)
    if value and not (value.isascii() and value.isdigit() and len(value) <= 20 and int(value) < 1 << 64):
        raise InvalidRequest(f"{name} is {value[:40]!r}; it must be in [0, 2**64)")
    return int(value) if value else None
