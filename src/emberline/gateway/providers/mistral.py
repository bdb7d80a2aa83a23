"""Mistral: rejects unknown fields, and requires tool call ids of nine letters and digits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from emberline.gateway.call import Call, Dialect
from emberline.gateway.providers.base import report
from emberline.gateway.providers.chatty import Chatty, decoded_field
from emberline.gateway.streams.splitter import Splitter, payload_of
from emberline.gateway.upstream.decoder import Decoder
from emberline.gateway.upstream.outgoing import Outgoing
from emberline.net.notjson import NOT_JSON

_ID = re.compile(r"[a-zA-Z0-9]{9}")
_FOREIGN = ("name", "refusal", "reasoning_content", "reasoning", "audio", "annotations", "function_call")
_SIGNS = (
    b'"developer"',
    b'"tool_call',
    *(f'"{name}"'.encode() for name in _FOREIGN),
)  # messages without any of these need no change


class Mistral(Chatty):
    slug = "mistral"
    base_url = "https://api.mistral.ai/v1"
    paths: ClassVar[Mapping[Dialect, str]] = {"openai-chat": "chat/completions", "openai-embeddings": "embeddings"}
    counts_streams = False
    prefill = "prefix"
    renames: ClassVar[Mapping[str, str]] = {"seed": "random_seed"}
    refuses = frozenset({"logit_bias", "logprobs", "top_logprobs", "user", "store", "service_tier", "verbosity",
                         "modalities", "safety_identifier", "prompt_cache_key"})  # fmt: skip

    def request(self, call: Call, key: str | None) -> Outgoing:
        request = super().request(call, key)
        if call.plain and call.dialect == "openai-chat":
            return msgspec.structs.replace(request, decoder=Flattened)
        return request

    def reword(self, fields: dict[str, Any], call: Call) -> None:
        text = bytes(fields.get("messages", b""))
        if not any(sign in text for sign in _SIGNS):
            return
        messages = decoded_field(fields, "messages")
        if not isinstance(messages, list):
            return
        for message in messages:
            if isinstance(message, dict):
                self._fit(message, call)
        fields["messages"] = messages

    def _fit(self, message: dict[str, Any], call: Call) -> None:
        for name in _FOREIGN:
            if name in message and (name != "name" or message.get("role") != "tool") and message.pop(name):
                report(call, f"messages[].{name}", f"{self.slug} does not accept it")
        if message.get("role") == "developer":
            message["role"] = "system"
        for called in message.get("tool_calls") or ():
            if isinstance(called, dict) and isinstance(called.get("id"), str):
                called["id"] = short_id(called["id"])
        if isinstance(message.get("tool_call_id"), str):
            message["tool_call_id"] = short_id(message["tool_call_id"])


class Flattened(Decoder):
    """Turns a list of text and thinking parts into `content` and `reasoning_content`."""

    def __init__(self) -> None:
        self._splitter = Splitter()

    def whole(self, body: bytes) -> bytes:
        return _flat(body, "message") or body

    def push(self, data: bytes) -> bytes:
        return b"".join(self._event(event) for event in self._splitter.push(data))

    def _event(self, event: bytes) -> bytes:
        result = _flat(payload_of(event)[1], "delta")
        return event if result is None else b"data: %b\n\n" % result

    def end(self) -> bytes:
        return self._splitter.rest


def _flat(payload: bytes, name: str) -> bytes | None:
    """Return the payload with flattened content, None if nothing is to be flattened."""
    if b'"thinking"' not in payload:
        return None
    try:
        data = msgspec.json.decode(payload)
        for choice in data["choices"]:
            message = choice[name]
            if isinstance(message.get("content"), list):
                parts, message["content"] = message["content"], ""
                for part in parts:
                    if part["type"] == "thinking":
                        thoughts = "".join(each["text"] for each in part["thinking"] if each["type"] == "text")
                        message["reasoning_content"] = message.get("reasoning_content", "") + thoughts
                    elif part["type"] == "text":
                        message["content"] += part["text"]
    except (*NOT_JSON, KeyError, TypeError, AttributeError):
        return None  # the event reader reports malformed events
    return msgspec.json.encode(data)


def short_id(id: str) -> str:
    """Return an id that Mistral accepts; equal ids stay equal, so that results still match their calls."""
    return id if _ID.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]
