"""SGLangDialect: writes the router's requests for SGLang servers in disaggregation mode.

The prefill worker and the decode worker get the request at the same time. Both get the same room number, by which they
find each other at the prefill worker's bootstrap server. A decode worker cannot compute a prompt itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from emberline.core.handoff import Handoff
from emberline.router.dialect import PrefillMessage, PrefillReplyParser, Ticket
from emberline.router.upstream_request import UpstreamRequest


class SGLangPrefillReplyParser:
    """Ignores the body of a prefill reply; the end of the reply means that the prefill is complete."""

    def push(self, data: bytes) -> Iterator[PrefillMessage]:
        yield from ()

    def finish(self) -> Iterator[PrefillMessage]:
        yield PrefillMessage(done={})


@dataclass(frozen=True, slots=True)
class SGLangDialect:
    client_request: UpstreamRequest
    bootstrap_room: int  # in [0, 2**63), unique to this request
    decode_worker_can_prefill: bool = False
    runs_prefill_to_end: bool = True

    def build_plain_request(self, is_stream: bool) -> UpstreamRequest:
        # Only the router sets these fields.
        return self.client_request.without_fields("bootstrap_host", "bootstrap_port", "bootstrap_room")

    def build_prefill_request(
        self, prefill_engine: Mapping[str, Any], timeout_s: float
    ) -> tuple[UpstreamRequest, PrefillReplyParser, Ticket | None]:
        bootstrap = {
            "bootstrap_host": prefill_engine["host"],
            "bootstrap_port": prefill_engine["port"],
            "bootstrap_room": self.bootstrap_room,
        }
        return (
            self.client_request.with_fields({**bootstrap, "stream": False}, "stream_options"),
            SGLangPrefillReplyParser(),
            bootstrap,
        )

    def build_decode_request(self, ticket: Ticket, timeout_s: float) -> UpstreamRequest:
        return self.client_request.with_fields(ticket)

    def build_resume_request(
        self, handoff: Handoff, timeout_s: float, reply_id: str | None, created: int | None
    ) -> None:
        return None
