"""Native: the dialect of our own workers. All that are tried get the same seed, so all would say the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from emberline.core.handoff import Handoff, Said
from emberline.net.notjson import NOT_JSON
from emberline.router.call import Call
from emberline.router.dialect import CHAIN, PRIVATE, TENANT, Garbled, Ticket, Word, Words

RESUME, PREFILL = "/cluster/resume", "/cluster/prefill"
CLUSTER_KEY = f"{PRIVATE}cluster-key"
LONGEST = 16 << 20  # bytes of a line

_WORD = msgspec.json.Decoder(Word)


class Lines:
    """A prefill says each word in a line, as it happens."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> Iterator[Word]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST:
            raise Garbled("a line without end")
        for line in filter(None, whole):
            try:
                yield _WORD.decode(line)
            except NOT_JSON as e:
                raise Garbled(str(e)) from e

    def close(self) -> Iterator[Word]:
        yield from ()


@dataclass(frozen=True, slots=True)
class Native:
    call: Call  # as it came, without what belongs to one connection
    seed: int
    key: str | None  # the cluster's
    created: int | None = None  # when the reply is said to be made; None: whoever begins it says when
    said: tuple[Said, ...] = ()  # of the reply so far: a prefill computes and offers it too
    computes: bool = True
    detached: bool = False

    def plain(self, stream: bool) -> Call:
        given = {f"{PRIVATE}seed": str(self.seed)}
        if self.key:  # it vouches for the client, whose own key may be known to the router alone
            given[CLUSTER_KEY] = self.key
        if self.created is not None:
            given[f"{PRIVATE}created"] = str(self.created)
        return self.call.with_headers(given | ({f"{PRIVATE}track": "1"} if stream else {}))

    def prefill(self, peer: Mapping[str, Any], timeout: float) -> tuple[Call, Words, Ticket | None]:
        return self._between(PREFILL, Handoff(self.said), timeout), Lines(), None

    def answer(self, ticket: Ticket, timeout: float) -> Call:
        return self._between(RESUME, Handoff(source=ticket), timeout)

    def resume(self, handoff: Handoff, timeout: float, id_: str | None, created: int | None) -> Call:
        return self._between(RESUME, handoff, timeout, id_, created)

    def _between(
        self, target: str, handoff: Handoff, timeout: float, id_: str | None = None, created: int | None = None
    ) -> Call:
        headers = {**self.call.traces, "content-type": "application/json"}
        headers |= {name: self.call.headers[name] for name in (CHAIN, TENANT) if name in self.call.headers}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        envelope = {
            "path": self.call.path,
            "body": msgspec.Raw(self.call.body),
            "seed": self.seed,
            "handoff": handoff.as_dict(),
            "timeout": None if math.isinf(timeout) else round(max(timeout, 0.001), 3),
            "id": id_,
            "created": self.created if created is None else created,
        }
        return Call("POST", target, headers, msgspec.json.encode(envelope))
