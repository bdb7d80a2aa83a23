"""NativeDialect: writes the router's requests for Emberline's own workers.

All attempts of one request carry the same random seed, so that each worker generates the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from emberline.core.handoff import EVENT_IDS_HEADER, Handoff, TokenGroup
from emberline.core.tenants import TENANT_SALT_HEADER
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.router.dialect import (
    CHAIN_HEADER,
    PRIVATE_HEADER_PREFIX,
    TENANT_HEADER,
    InvalidWorkerReply,
    PrefillMessage,
    PrefillReplyParser,
    Ticket,
)
from emberline.router.upstream_request import UpstreamRequest

RESUME_PATH, PREFILL_PATH = "/cluster/resume", "/cluster/prefill"
CLUSTER_KEY_HEADER = f"{PRIVATE_HEADER_PREFIX}cluster-key"
MAX_LINE_BYTES = 16 << 20

_PREFILL_MESSAGE = msgspec.json.Decoder(PrefillMessage)


class NativePrefillReplyParser:
    """Parses a prefill reply of JSON lines; the worker sends one message per line while it computes the prompt."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> Iterator[PrefillMessage]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise InvalidWorkerReply(
                f"a line of the prefill worker's reply exceeds the limit of {MAX_LINE_BYTES} bytes"
            )
        for line in filter(None, lines):
            try:
                yield _PREFILL_MESSAGE.decode(line)
            except JSON_DECODE_ERRORS as e:
                raise InvalidWorkerReply(str(e)) from e

    def finish(self) -> Iterator[PrefillMessage]:
        yield from ()


@dataclass(frozen=True, slots=True)
class NativeDialect:
    client_request: UpstreamRequest  # the client's request without hop-by-hop headers
    seed: int
    cluster_key: str | None
    created: int | None = None  # Unix time of the reply's `created` field; None: the first worker sets it
    output_groups: tuple[TokenGroup, ...] = ()  # output so far: a prefill computes its blocks as well
    decode_worker_can_prefill: bool = True
    runs_prefill_to_end: bool = False

    def build_plain_request(self, is_stream: bool) -> UpstreamRequest:
        headers = {f"{PRIVATE_HEADER_PREFIX}seed": str(self.seed)}
        if self.cluster_key:  # the worker then accepts the client's own API key, which only the router may know
            headers[CLUSTER_KEY_HEADER] = self.cluster_key
        if self.created is not None:
            headers[f"{PRIVATE_HEADER_PREFIX}created"] = str(self.created)
        return self.client_request.with_headers(headers | ({f"{PRIVATE_HEADER_PREFIX}track": "1"} if is_stream else {}))

    def build_prefill_request(
        self, prefill_engine: Mapping[str, Any], timeout_s: float
    ) -> tuple[UpstreamRequest, PrefillReplyParser, Ticket | None]:
        return (
            self._build_cluster_request(PREFILL_PATH, Handoff(self.output_groups), timeout_s),
            NativePrefillReplyParser(),
            None,
        )

    def build_decode_request(self, ticket: Ticket, timeout_s: float) -> UpstreamRequest:
        return self._build_cluster_request(RESUME_PATH, Handoff(source=ticket), timeout_s)

    def build_resume_request(
        self, handoff: Handoff, timeout_s: float, reply_id: str | None, created: int | None
    ) -> UpstreamRequest:
        return self._build_cluster_request(RESUME_PATH, handoff, timeout_s, reply_id, created)

    def _build_cluster_request(
        self, path: str, handoff: Handoff, timeout_s: float, reply_id: str | None = None, created: int | None = None
    ) -> UpstreamRequest:
        headers = {**self.client_request.trace_headers, "content-type": "application/json"}
        headers |= {
            name: self.client_request.headers[name]
            for name in (CHAIN_HEADER, TENANT_HEADER, TENANT_SALT_HEADER, EVENT_IDS_HEADER)
            if name in self.client_request.headers
        }
        if self.cluster_key:
            headers["authorization"] = f"Bearer {self.cluster_key}"
        envelope = {
            "path": self.client_request.path,
            "body": msgspec.Raw(self.client_request.body),
            "seed": self.seed,
            "handoff": handoff.as_dict(),
            "timeout": None if math.isinf(timeout_s) else round(max(timeout_s, 0.001), 3),
            "id": reply_id,
            "created": self.created if created is None else created,
        }
        return UpstreamRequest("POST", path, headers, msgspec.json.encode(envelope))
