"""RequestContext: what a router adds to a request: the reply's id, time and seed, and the output of another worker.

They stay the same when the reply continues at another worker.
"""

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
LATEST = 1 << 37  # Unix time; later dates are outside the range of datetime


@dataclass(frozen=True, slots=True)
class Journey:
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # of the reply, without the protocol's prefix
    created: int = field(default_factory=lambda: int(time.time()))
    seed: int | None = None  # for a call without a seed
    timeout: float = math.inf  # seconds left for the request
    tracked: bool = False  # comments in the stream tell the router the tokens of its events
    chained: bool = False  # the reply tells the router the hash of the prompt's last full KV block
    handoff: Handoff = field(default_factory=Handoff)
    span: Span | None = None  # None: tracing is off
    tenant: str = ""  # cached blocks are shared only within a tenant; "": no API keys are configured

    def __post_init__(self) -> None:
        if not 0 <= self.created < LATEST:
            what = f"created is {self.created}; it must be a Unix time in [0, {LATEST})"
            raise InvalidRequest(what, param="created")

    @staticmethod
    def begun_by(exchange: Exchange, keyed: bool = False) -> Journey:
        """Read the context from a router's headers. `has_api_keys`: this server has API keys."""
        seed, created = _header_number(exchange, SEED), _header_number(exchange, CREATED)
        tracked, chained = exchange.header(TRACK) == "1", exchange.header(CHAIN) == "1"
        times: dict[str, Any] = {} if created is None else {"created": created}
        tenant = tenant_of(exchange) if keyed else tenant_by_router(exchange)
        return Journey(seed=seed, tracked=tracked, chained=chained, span=exchange.span, tenant=tenant, **times)


def tenant_by_router(exchange: Exchange, keyed: bool = False) -> str:
    """Return the tenant from the router's header, if API keys are configured there or here (`has_api_keys`)."""
    source, _, tenant = exchange.header(TENANT).partition(" ")
    return tenant if source == "checked" or keyed else ""


def _header_number(exchange: Exchange, name: str) -> int | None:
    value = exchange.header(name)
    if value and not (value.isascii() and value.isdigit() and len(value) <= 20 and int(value) < 1 << 64):
        raise InvalidRequest(f"header {name} is {value[:40]!r}; it must be an integer in [0, 2**64)")
    return int(value) if value else None
