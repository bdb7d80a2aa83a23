"""WorkerDialect: writes the router's requests for one kind of worker (Emberline, vLLM or SGLang).

There are four kinds of requests. A plain request is the client's own. A prefill request computes a prompt for a
different worker; its reply contains a ticket, with which that worker fetches the KV blocks. A decode request generates
the reply from KV blocks that a prefill worker computed. A resume request continues a stream that a different worker
began."""

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
        """Return the messages that become complete when the reply ends."""


class WorkerDialect(Protocol):
    """Writes one client's request for workers of one kind."""

    @property
    def decode_worker_can_prefill(self) -> bool:
        """Whether a decode worker can compute the prompt itself when no prefill worker sends KV blocks to it."""

    @property
    def runs_prefill_to_end(self) -> bool:
        """Whether a prefill must run to its end even if the client has disconnected.

        Servers of some kinds never free the KV blocks of an aborted prefill."""

    def build_plain_request(self, is_stream: bool) -> UpstreamRequest: ...

    def build_prefill_request(
        self, prefill_engine: Mapping[str, Any], timeout_s: float
    ) -> tuple[UpstreamRequest, PrefillReplyParser, Ticket | None]:
        """Return the prefill request, the parser of its reply, and the ticket for the KV blocks.

        The ticket is None if it arrives only with the reply. `prefill_engine`: the network address of the engine that
        computes the prompt, as its worker registered it."""

    def build_decode_request(self, ticket: Ticket, timeout_s: float) -> UpstreamRequest: ...

    def build_resume_request(
        self, handoff: Handoff, timeout_s: float, reply_id: str | None, created: int | None
    ) -> UpstreamRequest | None:
        """Return the request that continues a stream, or None if servers of this kind cannot continue one."""
