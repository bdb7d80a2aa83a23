"""Perplexity: every stream event contains the usage, and most streams end without [DONE]."""

from __future__ import annotations

import msgspec

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.core.request import GatewayRequest
from emberline.gateway.providers.chat_provider import ChatProvider
from emberline.gateway.upstream.provider_request import ProviderRequest
from emberline.gateway.upstream.reply_decoder import ReplyDecoder
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire import sse
from emberline.wire.event_splitter import EventSplitter, parse_event


class Perplexity(ChatProvider):
    slug = "perplexity-ai"
    base_url = "https://api.perplexity.ai"
    supports_include_usage = False

    def build_request(self, call: GatewayRequest, key: str | None) -> ProviderRequest:
        request = super().build_request(call, key)
        if call.dialect == "openai-chat" and call.stream:
            return msgspec.structs.replace(request, decoder=PerplexityStreamDecoder)
        return request


class PerplexityStreamDecoder(ReplyDecoder):
    """Adds [DONE] to the end of a stream that has a finish reason but no [DONE]."""

    def __init__(self) -> None:
        self._splitter = EventSplitter(UpstreamBroken)
        self._has_finish_reason = self._has_done_marker = False

    def push(self, data: bytes) -> bytes:
        for event in self._splitter.push(data):
            _, payload = parse_event(event)
            self._has_done_marker |= payload == b"[DONE]"
            self._has_finish_reason |= b'"finish_reason"' in payload and _has_finish_reason(payload)
        return data

    def end(self) -> bytes:
        return sse.DONE_EVENT if self._has_finish_reason and not self._has_done_marker else b""


class _StreamChoice(msgspec.Struct):
    finish_reason: str | None = None


class _StreamEvent(msgspec.Struct):
    choices: list[_StreamChoice] = []


_EVENT_DECODER = msgspec.json.Decoder(_StreamEvent)


def _has_finish_reason(payload: bytes) -> bool:
    try:
        return any(choice.finish_reason for choice in _EVENT_DECODER.decode(payload).choices)
    except JSON_DECODE_ERRORS:
        return False  # the event reader reports malformed events
