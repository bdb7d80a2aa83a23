"""RequestContext: values of a request from outside its body: reply id, creation time, seed, tenant.

A router sends these values, so that they stay the same when a different worker continues the reply. In that case the
router also sends a handoff with the output that was generated so far.
"""

from __future__ import annotations

import math
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from emberline.core.errors import InvalidRequest
from emberline.core.handoff import EVENT_IDS_HEADER, Handoff
from emberline.server.access import derive_tenant_id
from emberline.server.exchange import Exchange
from emberline.trace.span import Span

SEED_HEADER = "x-emberline-seed"
CREATED_HEADER = "x-emberline-created"
TRACK_HEADER = "x-emberline-track"
CHAIN_HEADER = "x-emberline-chain"
TENANT_HEADER = "x-emberline-tenant"
MAX_CREATED_S = 1 << 37  # Unix time; later dates are outside the range of datetime


@dataclass(frozen=True, slots=True)
class RequestContext:
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # of the reply, without the protocol's prefix
    created: int = field(default_factory=lambda: int(time.time()))
    seed: int | None = None  # for a call without a seed
    timeout: float = math.inf  # seconds left for the request
    is_tracked: bool = False  # comments in the stream tell the router the tokens of its events
    has_event_ids: bool = False  # any router can continue the stream after an event, by the event's id
    reports_chain: bool = False  # the reply tells the router the hash of the prompt's last full KV block
    handoff: Handoff = field(default_factory=Handoff)
    span: Span | None = None  # None: tracing is off
    tenant: str = ""  # cached blocks are shared only within a tenant; "": no API keys and no gateway

    def __post_init__(self) -> None:
        if not 0 <= self.created < MAX_CREATED_S:
            what = f"created is {self.created}; it must be a Unix time in [0, {MAX_CREATED_S})"
            raise InvalidRequest(what, param="created")

    @staticmethod
    def from_exchange(exchange: Exchange, has_api_keys: bool = False) -> RequestContext:
        """Return the context in the headers of a request. `has_api_keys`: clients of this server need an API key."""
        seed, created = _parse_integer_header(exchange, SEED_HEADER), _parse_integer_header(exchange, CREATED_HEADER)
        tracked, chained = exchange.header(TRACK_HEADER) == "1", exchange.header(CHAIN_HEADER) == "1"
        times: dict[str, Any] = {} if created is None else {"created": created}
        tenant = derive_tenant_id(exchange) if has_api_keys else tenant_from_router(exchange)
        return RequestContext(
            seed=seed,
            is_tracked=tracked,
            has_event_ids=tracked and exchange.header(EVENT_IDS_HEADER) == "1",
            reports_chain=chained,
            span=exchange.span,
            tenant=tenant,
            **times,
        )


def tenant_from_router(exchange: Exchange, has_api_keys: bool = False) -> str:
    """Return the tenant in the router's header.

    If neither the router nor this server requires API keys, only a gateway's tenant salt makes a tenant.
    """
    source, _, tenant = exchange.header(TENANT_HEADER).partition(" ")
    return tenant if source == "checked" or has_api_keys else derive_tenant_id(exchange, with_key=False)


def _parse_integer_header(exchange: Exchange, name: str) -> int | None:
    value = exchange.header(name)
    if value and not (value.isascii() and value.isdigit() and len(value) <= 20 and int(value) < 1 << 64):
        raise InvalidRequest(f"header {name} is {value[:40]!r}; it must be an integer in [0, 2**64)")
    return int(value) if value else None
