"""Perplexity: every event has the usage, and most streams end without [DONE]."""

from __future__ import annotations

import msgspec

from emberline.api import sse
from emberline.gateway.call import Call
from emberline.gateway.providers.chatty import Chatty
from emberline.gateway.streams.splitter import Splitter, payload_of
from emberline.gateway.upstream.decoder import Decoder
from emberline.gateway.upstream.outgoing import Outgoing
from emberline.net.notjson import NOT_JSON


class Perplexity(Chatty):
    slug = "perplexity-ai"
    base_url = "https://api.perplexity.ai"
    counts_streams = False

    def request(self, call: Call, key: str | None) -> Outgoing:
        request = super().request(call, key)
        if call.dialect == "openai-chat" and call.stream:
            return Outgoing(request.method, request.url, request.headers, request.body, request.public, Ending)
        return request


class Ending(Decoder):
    """Adds [DONE] at the end of a stream that has a finish reason and lacks it."""

    def __init__(self) -> None:
        self._splitter = Splitter()
        self._finished = self._done = False

    def push(self, data: bytes) -> bytes:
        for event in self._splitter.push(data):
            _, payload = payload_of(event)
            self._done |= payload == b"[DONE]"
            self._finished |= b'"finish_reason"' in payload and _reason(payload)
        return data

    def end(self) -> bytes:
        return sse.DONE if self._finished and not self._done else b""


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


_EVENT = msgspec.json.Decoder(_Event)


def _reason(payload: bytes) -> bool:
    try:
        return any(choice.finish_reason for choice in _EVENT.decode(payload).choices)
    except NOT_JSON:
        return False  # the event reader reports malformed events
