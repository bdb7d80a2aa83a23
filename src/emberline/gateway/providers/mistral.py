"""Mistral: rejects unknown fields, and requires tool call ids of nine letters and digits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.core.request import Dialect, GatewayRequest
from emberline.gateway.providers.base import report_change
from emberline.gateway.providers.chat_provider import ChatProvider, decode_field
from emberline.gateway.providers.inference_paths import OPENAI_INFERENCE, TEXT, InferencePaths
from emberline.gateway.upstream.provider_request import ProviderRequest
from emberline.gateway.upstream.reply_decoder import ReplyDecoder
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire.event_splitter import EventSplitter, parse_event

_TOOL_CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_UNSUPPORTED_MESSAGE_FIELDS = (
    "name",
    "refusal",
    "reasoning_content",
    "reasoning",
    "audio",
    "annotations",
    "function_call",
)
# Messages without any of these need no change.
_ADAPTATION_MARKERS = (
    b'"developer"',
    b'"tool_call',
    *(f'"{name}"'.encode() for name in _UNSUPPORTED_MESSAGE_FIELDS),
)


class Mistral(ChatProvider):
    slug = "mistral"
    base_url = "https://api.mistral.ai/v1"
    paths: ClassVar[Mapping[Dialect, str]] = {"openai-chat": "chat/completions", "openai-embeddings": "embeddings"}
    unified_families = TEXT | {"audio/speech", "audio/transcriptions", "moderations", "files"}
    inference_paths = InferencePaths(
        (*OPENAI_INFERENCE, "fim/completions", "ocr", "chat/moderations", "classifications")
    )
    supports_include_usage = False
    prefill = "prefix"
    renamed_fields: ClassVar[Mapping[str, str]] = {"seed": "random_seed"}
    unsupported_fields = frozenset(
        {
            "logit_bias",
            "logprobs",
            "top_logprobs",
            "user",
            "store",
            "service_tier",
            "verbosity",
            "modalities",
            "safety_identifier",
            "prompt_cache_key",
        }
    )

    def build_request(self, call: GatewayRequest, key: str | None) -> ProviderRequest:
        request = super().build_request(call, key)
        if call.is_dialect_endpoint and call.dialect == "openai-chat":
            return msgspec.structs.replace(request, decoder=MistralReplyDecoder)
        return request

    def adapt_fields(self, fields: dict[str, Any], call: GatewayRequest) -> None:
        text = bytes(fields.get("messages", b""))
        if not any(marker in text for marker in _ADAPTATION_MARKERS):
            return
        messages = decode_field(fields, "messages")
        if not isinstance(messages, list):
            return
        for message in messages:
            if isinstance(message, dict):
                self._adapt_message(message, call)
        fields["messages"] = messages

    def _adapt_message(self, message: dict[str, Any], call: GatewayRequest) -> None:
        for name in _UNSUPPORTED_MESSAGE_FIELDS:
            if name in message and (name != "name" or message.get("role") != "tool") and message.pop(name):
                report_change(call, f"messages[].{name}", f"{self.slug} does not accept it")
        if message.get("role") == "developer":
            message["role"] = "system"
        for tool_call in message.get("tool_calls") or ():
            if isinstance(tool_call, dict) and isinstance(tool_call.get("id"), str):
                tool_call["id"] = to_mistral_id(tool_call["id"])
        if isinstance(message.get("tool_call_id"), str):
            message["tool_call_id"] = to_mistral_id(message["tool_call_id"])


class MistralReplyDecoder(ReplyDecoder):
    """Converts a list of text and thinking parts to the fields `content` and `reasoning_content`."""

    def __init__(self) -> None:
        self._splitter = EventSplitter(UpstreamBroken)

    def decode_body(self, body: bytes) -> bytes:
        return _flatten_content(body, "message") or body

    def push(self, data: bytes) -> bytes:
        return b"".join(self._decode_event(event) for event in self._splitter.push(data))

    def _decode_event(self, event: bytes) -> bytes:
        result = _flatten_content(parse_event(event)[1], "delta")
        return event if result is None else b"data: %b\n\n" % result

    def end(self) -> bytes:
        return self._splitter.partial_event


def _flatten_content(payload: bytes, message_field: str) -> bytes | None:
    """Return the payload with each list of text and thinking parts replaced by text fields.

    Return None if the payload has no such list. `message_field` is the field of a choice that contains the message:
    "message", or "delta" in a stream.
    """
    if b'"thinking"' not in payload:
        return None
    try:
        data = msgspec.json.decode(payload)
        for choice in data["choices"]:
            message = choice[message_field]
            if isinstance(message.get("content"), list):
                parts, message["content"] = message["content"], ""
                for part in parts:
                    if part["type"] == "thinking":
                        reasoning = "".join(row["text"] for row in part["thinking"] if row["type"] == "text")
                        message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
                    elif part["type"] == "text":
                        message["content"] += part["text"]
    except (*JSON_DECODE_ERRORS, KeyError, TypeError, AttributeError):
        return None  # the event reader reports malformed events
    return msgspec.json.encode(data)


def to_mistral_id(id: str) -> str:
    """Return an id that Mistral accepts: nine letters and digits.

    Equal ids give equal results, so that the results of tools still match their tool calls.
    """
    return id if _TOOL_CALL_ID.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]
