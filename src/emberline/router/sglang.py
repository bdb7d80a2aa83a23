"""SGLang: the dialect of SGLang servers started for disaggregation. Both workers are asked at once and meet in a room
at the first one's bootstrap server; one that decodes cannot do without the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from emberline.core.handoff import Handoff
from emberline.router.call import Call
from emberline.router.dialect import Ticket, Word, Words


class Silence:
    """Nothing that a prefill replies matters, but that it ends."""

    def push(self, data: bytes) -> Iterator[Word]:
        yield from ()

    def close(self) -> Iterator[Word]:
        yield Word(done={})


@dataclass(frozen=True, slots=True)
class SGLang:
    call: Call
    room: int  # in [0, 2**63), of this request alone
    computes: bool = False
    detached: bool = True

    def plain(self, stream: bool) -> Call:
        return self.call.without_fields("bootstrap_host", "bootstrap_port", "bootstrap_room")  # of a client

    def prefill(self, peer: Mapping[str, Any], timeout: float) -> tuple[Call, Words, Ticket | None]:
        place = {"bootstrap_host": peer["host"], "bootstrap_port": peer["port"], "bootstrap_room": self.room}
        return self.call.with_fields({**place, "stream": False}, "stream_options"), Silence(), place

    def answer(self, ticket: Ticket, timeout: float) -> Call:
        return self.call.with_fields(ticket)

    def resume(self, handoff: Handoff, timeout: float, id_: str | None, created: int | None) -> None:
        return None
