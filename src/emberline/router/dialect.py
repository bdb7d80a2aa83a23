"""WorkerDialect: how requests to workers of one kind are written.

There are four: plain, prefill for another worker, decode, resume. A prefill's reply is parsed into messages: a ticket,
with which another worker fetches the KV blocks, and completion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from emberline.core.handoff import Handoff
from emberline.router.upstream_request import UpstreamRequest

PRIVATE_HEADER_PREFIX = "x-emberline-"  # headers between router and workers; removed from clients' requests
# Request: report the prompt's last block; reply without a stream: that block.
CHAIN_HEADER = f"{PRIVATE_HEADER_PREFIX}chain"
# "checked" or "presented", then the identifier of the client's API key.
TENANT_HEADER = f"{PRIVATE_HEADER_PREFIX}tenant"
Ticket = dict[str, Any]  # where and under which id another worker fetches a prompt's KV blocks


class InvalidWorkerReply(Exception):
    """A worker's reply violates the protocol between router and workers."""


class PrefillMessage(msgspec.Struct):
    ticket: Ticket | None = None
    done: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class PrefillReplyParser(Protocol):
    """Parses the reply to one prefill request."""

    def push(self, data: bytes) -> Iterable[PrefillMessage]: ...

    def finish(self) -> Iterable[PrefillMessage]:
        """Return the messages that are complete at the end of the reply."""


class WorkerDialect(Protocol):
    """Writes one client's request for workers of one kind."""

    @property
    def decode_worker_can_prefill(self) -> bool:
        """Whether a decode worker can compute the prompt itself when it gets no blocks."""

    @property
    def runs_prefill_to_end(self) -> bool:
        """Whether a prefill must run to its end after its client disconnected.

        Aborting it would leak its blocks on servers of this kind."""

    def build_plain_request(self, stream: bool) -> UpstreamRequest: ...

    def build_prefill_request(
        self, peer: Mapping[str, Any], timeout: float
    ) -> tuple[UpstreamRequest, PrefillReplyParser, Ticket | None]:
        """Return the request, the parser of its reply, and the ticket if it is known in advance.

        `peer` describes the engine of the worker that gets the request."""

    def build_decode_request(self, ticket: Ticket, timeout: float) -> UpstreamRequest: ...

    def build_resume_request(
        self, handoff: Handoff, timeout: float, reply_id: str | None, created: int | None
    ) -> UpstreamRequest | None:
        """Return the request that continues a stream; None if this kind of server cannot."""
