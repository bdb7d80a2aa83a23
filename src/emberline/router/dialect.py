"""WorkerDialect: how requests to workers of one kind are written.

There are four: plain, prefill for another worker, decode, resume. A prefill's reply is parsed into messages: a ticket,
with which another worker fetches the KV blocks, and completion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from emberline.core.handoff import Handoff
from emberline.router.call import Call

PRIVATE = "x-emberline-"  # headers between router and workers; removed from clients' requests
CHAIN = f"{PRIVATE}chain"  # request: report the prompt's last block; reply without a stream: that block
TENANT = f"{PRIVATE}tenant"  # "checked" or "presented", then the identifier of the client's API key
Ticket = dict[str, Any]  # where and under which id another worker fetches a prompt's KV blocks


class Garbled(Exception):
    """A worker's reply violates the protocol between router and workers."""


class Word(msgspec.Struct):
    ticket: Ticket | None = None
    done: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class Words(Protocol):
    """Parses the reply to one prefill request."""

    def push(self, data: bytes) -> Iterable[Word]: ...

    def close(self) -> Iterable[Word]:
        """Return the messages that are complete at the end of the reply."""


class Dialect(Protocol):
    """Writes one client's request for workers of one kind."""

    @property
    def computes(self) -> bool:
        """Whether a decode worker can compute the prompt itself when it gets no blocks."""

    @property
    def detached(self) -> bool:
        """Whether a prefill must run to its end after its client disconnected.

        Aborting it would leak its blocks on servers of this kind."""

    def plain(self, stream: bool) -> Call: ...

    def prefill(self, peer: Mapping[str, Any], timeout: float) -> tuple[Call, Words, Ticket | None]:
        """Return the request, the parser of its reply, and the ticket if it is known in advance.

        `peer` describes the engine of the worker that gets the request."""

    def answer(self, ticket: Ticket, timeout: float) -> Call: ...

    def resume(self, handoff: Handoff, timeout: float, id_: str | None, created: int | None) -> Call | None:
        """Return the request that continues a stream; None if this kind of server cannot."""
