"""VLLMDialect: requests to vLLM servers whose KV connector pulls blocks (`kv_transfer_params`).

A prefill is an ordinary request for one token; the `kv_transfer_params` of its reply are passed to the decode worker
unchanged."""

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


class _PrefillReply(msgspec.Struct):
    kv_transfer_params: Ticket | None = None


class VLLMPrefillReplyParser:
    """Collects a prefill's reply, which is complete only at its end."""

    def __init__(self) -> None:
        self._data = bytearray()

    def push(self, data: bytes) -> Iterator[PrefillMessage]:
        self._data += data
        if len(self._data) > MAX_PREFILL_REPLY_BYTES:
            raise InvalidWorkerReply(f"the prefill reply exceeds {MAX_PREFILL_REPLY_BYTES} bytes")
        yield from ()

    def finish(self) -> Iterator[PrefillMessage]:
        try:
            yield PrefillMessage(ticket=msgspec.json.decode(self._data, type=_PrefillReply).kv_transfer_params)
        except JSON_DECODE_ERRORS as e:
            raise InvalidWorkerReply(str(e)) from e
        yield PrefillMessage(done={})


@dataclass(frozen=True, slots=True)
class VLLMDialect:
    client_request: UpstreamRequest
    decode_worker_can_prefill: bool = True
    runs_prefill_to_end: bool = False

    def build_plain_request(self, stream: bool) -> UpstreamRequest:
        # A client must not choose where blocks are read.
        return self.client_request.without_fields("kv_transfer_params")

    def build_prefill_request(
        self, peer: Mapping[str, Any], timeout: float
    ) -> tuple[UpstreamRequest, PrefillReplyParser, Ticket | None]:
        fields = {"stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE_PARAMS}
        if self.client_request.path == "/v1/chat/completions":
            fields["max_completion_tokens"] = 1
        return self.client_request.with_fields(fields, "stream_options", "min_tokens"), VLLMPrefillReplyParser(), None

    def build_decode_request(self, ticket: Ticket, timeout: float) -> UpstreamRequest:
        return self.client_request.with_fields({"kv_transfer_params": ticket})

    def build_resume_request(self, handoff: Handoff, timeout: float, reply_id: str | None, created: int | None) -> None:
        return None
