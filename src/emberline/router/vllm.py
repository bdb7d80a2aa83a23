"""VLLMDialect: writes the router's requests for vLLM servers with a KV connector that fetches blocks from a peer.

A prefill is an ordinary request for one token. Its reply contains `kv_transfer_params`, which the router passes to the
decode worker unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from emberline.core.handoff import Handoff
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.router.dialect import InvalidWorkerReply, PrefillMessage, PrefillReplyParser, Ticket
from emberline.router.upstream_request import UpstreamRequest

MAX_PREFILL_REPLY_BYTES = 16 << 20
REMOTE_DECODE_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                        "remote_block_ids": None, "remote_host": None, "remote_port": None}  # fmt: skip


class _VLLMPrefillReply(msgspec.Struct):
    kv_transfer_params: Ticket | None = None


class VLLMPrefillReplyParser:
    """Collects the body of a prefill reply, which can be parsed only when it is complete."""

    def __init__(self) -> None:
        self._data = bytearray()

    def push(self, data: bytes) -> Iterator[PrefillMessage]:
        self._data += data
        if len(self._data) > MAX_PREFILL_REPLY_BYTES:
            raise InvalidWorkerReply(f"the prefill server's reply exceeds the limit of {MAX_PREFILL_REPLY_BYTES} bytes")
        yield from ()

    def finish(self) -> Iterator[PrefillMessage]:
        try:
            yield PrefillMessage(ticket=msgspec.json.decode(self._data, type=_VLLMPrefillReply).kv_transfer_params)
        except JSON_DECODE_ERRORS as e:
            raise InvalidWorkerReply(str(e)) from e
        yield PrefillMessage(done={})


@dataclass(frozen=True, slots=True)
class VLLMDialect:
    client_request: UpstreamRequest
    decode_worker_can_prefill: bool = True
    runs_prefill_to_end: bool = False

    def build_plain_request(self, is_stream: bool) -> UpstreamRequest:
        # A client must not choose where blocks are read.
        return self.client_request.without_fields("kv_transfer_params")

    def build_prefill_request(
        self, prefill_engine: Mapping[str, Any], timeout_s: float
    ) -> tuple[UpstreamRequest, PrefillReplyParser, Ticket | None]:
        fields = {"stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE_PARAMS}
        if self.client_request.path == "/v1/chat/completions":
            fields["max_completion_tokens"] = 1
        return self.client_request.with_fields(fields, "stream_options", "min_tokens"), VLLMPrefillReplyParser(), None

    def build_decode_request(self, ticket: Ticket, timeout_s: float) -> UpstreamRequest:
        return self.client_request.with_fields({"kv_transfer_params": ticket})

    def build_resume_request(
        self, handoff: Handoff, timeout_s: float, reply_id: str | None, created: int | None
    ) -> None:
        return None
