"""NativeDialect: requests to Emberline's own workers.

All attempts of a request carry the same seed, so that every worker generates the same tokens."""

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
LONGEST = 16 << 20

_WORD = msgspec.json.Decoder(Word)


class Lines:
    """Parses JSON lines, one message per line, sent as the prefill progresses."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> Iterator[Word]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST:
            raise Garbled(f"a line of the prefill reply exceeds {LONGEST} bytes")
        for line in filter(None, whole):
            try:
                yield _WORD.decode(line)
            except NOT_JSON as e:
                raise Garbled(str(e)) from e

    def close(self) -> Iterator[Word]:
        yield from ()


@dataclass(frozen=True, slots=True)
class Native:
    call: Call  # the client's request without hop-by-hop headers
    seed: int
    key: str | None
    created: int | None = None  # Unix time of the reply's `created` field; None: the first worker sets it
    said: tuple[Said, ...] = ()  # output so far: a prefill computes its blocks as well
    computes: bool = True
    detached: bool = False

    def plain(self, stream: bool) -> Call:
        headers = {f"{PRIVATE}seed": str(self.seed)}
        if self.key:  # the worker then accepts the client's own API key, which only the router may know
            headers[CLUSTER_KEY] = self.key
        if self.created is not None:
            headers[f"{PRIVATE}created"] = str(self.created)
        return self.call.with_headers(headers | ({f"{PRIVATE}track": "1"} if stream else {}))

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
