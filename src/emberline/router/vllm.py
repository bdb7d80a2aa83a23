"""VLLMDialect: requests to vLLM servers whose KV connector pulls blocks (`kv_transfer_params`).

A prefill is an ordinary request for one token; the `kv_transfer_params` of its reply are passed to the decode worker
unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from emberline.core.handoff import Handoff
from emberline.net.notjson import NOT_JSON
from emberline.router.call import Call
from emberline.router.dialect import Garbled, Ticket, Word, Words

LARGEST = 16 << 20
REMOTE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
          "remote_host": None, "remote_port": None}  # fmt: skip


class _Reply(msgspec.Struct):
    kv_transfer_params: Ticket | None = None


class Whole:
    """Collects a prefill's reply, which is complete only at its end."""

    def __init__(self) -> None:
        self._data = bytearray()

    def push(self, data: bytes) -> Iterator[Word]:
        self._data += data
        if len(self._data) > LARGEST:
            raise Garbled(f"the prefill reply exceeds {LARGEST} bytes")
        yield from ()

    def close(self) -> Iterator[Word]:
        try:
            yield Word(ticket=msgspec.json.decode(self._data, type=_Reply).kv_transfer_params)
        except NOT_JSON as e:
            raise Garbled(str(e)) from e
        yield Word(done={})


@dataclass(frozen=True, slots=True)
class VLLM:
    call: Call
    computes: bool = True
    detached: bool = False

    def plain(self, stream: bool) -> Call:
        return self.call.without_fields("kv_transfer_params")  # a client must not choose where blocks are read

    def prefill(self, peer: Mapping[str, Any], timeout: float) -> tuple[Call, Words, Ticket | None]:
        fields = {"stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE}
        if self.call.path == "/v1/chat/completions":
            fields["max_completion_tokens"] = 1
        return self.call.with_fields(fields, "stream_options", "min_tokens"), Whole(), None

    def answer(self, ticket: Ticket, timeout: float) -> Call:
        return self.call.with_fields({"kv_transfer_params": ticket})

    def resume(self, handoff: Handoff, timeout: float, id_: str | None, created: int | None) -> None:
        return None
