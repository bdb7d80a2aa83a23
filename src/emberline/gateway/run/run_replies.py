"""Replies of /ai/run: converts OpenAI's replies to the envelope and the events of Workers AI."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from emberline.core.offload import offload
from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.core.request import GatewayReply, ReplyStream
from emberline.gateway.dialects.errors import parse_error, parse_error_object
from emberline.gateway.run.run_request import EncodedRequest, RunEndpoint
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire import sse
from emberline.wire.event_splitter import EventSplitter, parse_event

Json = dict[str, Any]
BUSY_CODE = 3040  # error code of Workers AI: out of capacity
BUSY_MESSAGE = "Capacity temporarily exceeded, please try again."
_CODES = {400: 5006, 401: 10000, 403: 10000, 404: 5007, 413: 3006, 429: 2003}  # HTTP status -> code of Workers AI
FAILED_CODE = 3043  # error code of Workers AI for all other failures
_BUSY_ERRORS = ("upstream_refused", "upstream_resting")  # error codes of a provider that is out of capacity


def build_success_envelope(result: Any) -> Json:
    return {"result": result, "success": True, "errors": [], "messages": []}


def build_failure_envelope(code: int, message: str) -> Json:
    return {"result": None, "success": False, "errors": [{"code": code, "message": message}], "messages": []}


def is_provider_busy(reply: GatewayReply) -> bool:
    """Return whether the provider is out of capacity, so that a retry may succeed.

    Return False if a limit of the gateway itself was exceeded, because that error states the time to wait.
    """
    return reply.error in _BUSY_ERRORS and reply.status in (429, 503, 529)


async def to_run_reply(request: EncodedRequest, reply: GatewayReply) -> GatewayReply:
    """Convert the reply, in place, to the form of Workers AI.

    A large reply is converted in a child process.
    """
    if isinstance(reply.body, bytes):
        reply.headers["content-type"] = "application/json"
        if reply.status < 400:
            arguments = request.kind, reply.body, request.wants_json
            succeeded, reply.body = await offload.run_inline_if_small(
                len(reply.body), encode_reply_envelope, *arguments
            )
            if not succeeded:
                reply.status = 502
        else:
            reply.body = sse.dumps(build_error_reply_envelope(reply))
            reply.status = 429 if is_provider_busy(reply) else reply.status
    elif request.kind == "chat/completions":
        reply.body = RunStream(reply.body)
    return reply


async def read_envelope(request: EncodedRequest, reply: GatewayReply) -> Json:
    """Return the envelope of Workers AI for a reply that is not a stream."""
    assert isinstance(reply.body, bytes)
    if reply.status >= 400:
        return build_error_reply_envelope(reply)
    return await offload.run_inline_if_small(
        len(reply.body), reply_to_envelope, request.kind, reply.body, request.wants_json
    )


def build_error_reply_envelope(reply: GatewayReply) -> Json:
    """Return the envelope of Workers AI for an error reply."""
    assert isinstance(reply.body, bytes)
    if is_provider_busy(reply):
        return build_failure_envelope(BUSY_CODE, BUSY_MESSAGE)
    return build_failure_envelope(_CODES.get(reply.status, FAILED_CODE), parse_error(reply.body).message)


def encode_reply_envelope(endpoint: RunEndpoint, body: bytes, wants_json: bool) -> tuple[bool, bytes]:
    """Return whether the reply is valid, and its encoded envelope."""
    envelope = reply_to_envelope(endpoint, body, wants_json)
    return envelope["success"], sse.dumps(envelope)


def reply_to_envelope(endpoint: RunEndpoint, body: bytes, wants_json: bool) -> Json:
    """Return the envelope for the body of a successful reply.

    The envelope contains an error if the body is invalid.
    """
    try:
        return build_success_envelope(build_result(endpoint, msgspec.json.decode(body), wants_json))
    except (LookupError, TypeError, AttributeError, *JSON_DECODE_ERRORS) as e:
        return build_failure_envelope(FAILED_CODE, f"the provider's reply to {endpoint} is invalid: {e!r}")


def build_result(endpoint: RunEndpoint, reply: Json, wants_json: bool = False) -> Json:
    """Return the envelope's `result`.

    Raise LookupError, TypeError or AttributeError if the reply is invalid.
    """
    match endpoint:
        case "embeddings":
            vectors = [row["embedding"] for row in reply["data"]]
            return {"shape": [len(vectors), len(vectors[0]) if vectors else 0], "data": vectors} | _convert_usage(reply)
        case "responses":
            return reply
    message = reply["choices"][0]["message"]
    converted: Json = {"response": message.get("content")}
    if wants_json and isinstance(message.get("content"), str):
        with contextlib.suppress(*JSON_DECODE_ERRORS):
            converted["response"] = msgspec.json.decode(message["content"])
    if calls := message.get("tool_calls"):
        converted["tool_calls"] = [_convert_tool_call(each["function"]) for each in calls]
    return converted | _convert_usage(reply)


def _convert_usage(reply: Json) -> Json:
    return {"usage": reply["usage"]} if reply.get("usage") else {}


def _convert_tool_call(function: Json) -> Json:
    arguments: Any = function.get("arguments") or "{}"
    with contextlib.suppress(*JSON_DECODE_ERRORS):
        arguments = msgspec.json.decode(arguments)
    return {"name": function.get("name"), "arguments": arguments}


class RunStream:
    """Converts a stream of chat completion events to events of Workers AI.

    A tool call is sent in one event, when it is complete.
    """

    def __init__(self, stream: ReplyStream) -> None:
        self._stream = stream
        self._splitter = EventSplitter(UpstreamBroken)
        self._tools: dict[int, Json] = {}

    def __aiter__(self) -> RunStream:
        return self

    async def __anext__(self) -> bytes:
        while True:
            events = self._splitter.push(await self._stream.__anext__())
            if converted := b"".join(self._convert_event(parse_event(event)[1]) for event in events):
                return converted

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _convert_event(self, payload: bytes) -> bytes:
        if payload in (b"", b"[DONE]"):
            return sse.DONE_EVENT if payload else b""
        event = msgspec.json.decode(payload)
        if event.get("error"):
            return sse.encode_data_event(build_failure_envelope(FAILED_CODE, parse_error_object(event).message))
        converted = b"".join(self._convert_choice(choice) for choice in event.get("choices") or ())
        return converted + (
            sse.encode_data_event({"response": "", "usage": event["usage"]}) if event.get("usage") else b""
        )

    def _convert_choice(self, choice: Json) -> bytes:
        delta = choice.get("delta") or {}
        for piece in delta.get("tool_calls") or ():
            call = self._tools.setdefault(piece.get("index", 0), {"name": "", "arguments": ""})
            function = piece.get("function") or {}
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""
        converted = sse.encode_data_event({"response": delta["content"]}) if delta.get("content") else b""
        if choice.get("finish_reason") and self._tools:
            calls, self._tools = [_convert_tool_call(call) for call in self._tools.values()], {}
            converted += sse.encode_data_event({"response": "", "tool_calls": calls})
        return converted
