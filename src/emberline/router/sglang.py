"""SGLangDialect: requests to SGLang servers started for disaggregation.

Prefill and decode worker get the request at the same time and find each other by a room number at the prefill worker's
bootstrap server. A decode worker cannot compute a prompt itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from emberline.core.handoff import Handoff
from emberline.router.call import Call
from emberline.router.dialect import Ticket, Word, Words


class Silence:
    """Ignores the body of a prefill's reply: only its end matters."""

    def push(self, data: bytes) -> Iterator[Word]:
        yield from ()

    def close(self) -> Iterator[Word]:
        yield Word(done={})


@dataclass(frozen=True, slots=True)
class SGLang:
    call: Call
    room: int  # in [0, 2**63), unique to this request
    computes: bool = False
    detached: bool = True

    def plain(self, stream: bool) -> Call:
        # Only the router sets these fields.
        return self.call.without_fields("bootstrap_host", "bootstrap_port", "bootstrap_room")

    def prefill(self, peer: Mapping[str, Any], timeout: float) -> tuple[Call, Words, Ticket | None]:
        bootstrap = {"bootstrap_host": peer["host"], "bootstrap_port": peer["port"], "bootstrap_room": self.room}
        return self.call.with_fields({**bootstrap, "stream": False}, "stream_options"), Silence(), bootstrap

    def answer(self, ticket: Ticket, timeout: float) -> Call:
        return self.call.with_fields(ticket)

    def resume(self, handoff: Handoff, timeout: float, id_: str | None, created: int | None) -> None:
        return None
