"""Dialect: how workers of one kind are asked to answer, to prefill for another, and to go on. A prefill's reply is read
into words: a ticket, with which another worker finds the blocks, and that it is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from emberline.core.handoff import Handoff
from emberline.router.call import Call

PRIVATE = "x-emberline-"  # headers between router and workers: a client's are not passed on
CHAIN = f"{PRIVATE}chain"  # asks where the prompt ends, in blocks; in the reply to one that is no stream, the answer
TENANT = f"{PRIVATE}tenant"  # "checked" or "presented", and a name for the client's API key
Ticket = dict[str, Any]


class Garbled(Exception):
    """A worker says what none of its kind would."""


class Word(msgspec.Struct):
    ticket: Ticket | None = None
    done: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class Words(Protocol):
    """Of one prefill's reply."""

    def push(self, data: bytes) -> Iterable[Word]: ...

    def close(self) -> Iterable[Word]:
        """At the end of the reply."""


class Dialect(Protocol):
    """Of one client's call, on whichever workers it is tried."""

    @property
    def computes(self) -> bool:
        """A worker that decodes can do without blocks from another."""

    @property
    def detached(self) -> bool:
        """A prefill goes on to its end, whoever leaves: they would not let go of its blocks."""

    def plain(self, stream: bool) -> Call: ...

    def prefill(self, peer: Mapping[str, Any], timeout: float) -> tuple[Call, Words, Ticket | None]:
        """`peer`: who is asked. With a ticket there is no need to wait for its word."""

    def answer(self, ticket: Ticket, timeout: float) -> Call: ...

    def resume(self, handoff: Handoff, timeout: float, id_: str | None, created: int | None) -> Call | None:
        """None: they do not know how."""
