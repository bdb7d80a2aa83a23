"""Answer: a reply as Workers AI gives it: whole, in its envelope, or as events of its own."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from emberline.api import sse
from emberline.gateway.call import Reply, Stream
from emberline.gateway.dialects.problems import problem_of, read_error
from emberline.gateway.run.question import Kind, Question
from emberline.gateway.streams.splitter import Splitter, payload_of
from emberline.net.notjson import NOT_JSON

Json = dict[str, Any]
BUSY = 3040  # no room for it now
BUSY_TEXT = "Capacity temporarily exceeded, please try again."
_CODES = {400: 5006, 401: 10000, 403: 10000, 404: 5007, 413: 3006, 429: 2003}
FAILED = 3043  # of all that went wrong at the model
_WAITS = ("upstream_refused", "upstream_resting")  # what becomes of a provider that has no room


def enveloped(result: Any) -> Json:
    return {"result": result, "success": True, "errors": [], "messages": []}


def failed(code: int, message: str) -> Json:
    return {"result": None, "success": False, "errors": [{"code": code, "message": message}], "messages": []}


def is_busy(reply: Reply) -> bool:
    """It may have room later: not our own limits, which say when."""
    return reply.error in _WAITS and reply.status in (429, 503, 529)


def answered(asked: Question, reply: Reply) -> Reply:
    """The same reply in other words."""
    if isinstance(reply.body, bytes):
        reply.headers["content-type"] = "application/json"
        said = told(asked, reply)
        reply.body = sse.dumps(said)
        if is_busy(reply):
            reply.status = 429
        elif not said["success"] and reply.status < 400:
            reply.status = 502
    elif asked.kind == "chat/completions":
        reply.body = RunStream(reply.body)
    return reply


def told(asked: Question, reply: Reply) -> Json:
    assert isinstance(reply.body, bytes)
    if is_busy(reply):
        return failed(BUSY, BUSY_TEXT)
    if reply.status >= 400:
        return failed(_CODES.get(reply.status, FAILED), read_error(reply.body).message)
    wants_json = isinstance(asked.body.get("response_format"), dict)
    try:
        return enveloped(result(asked.kind, msgspec.json.decode(reply.body), wants_json))
    except (LookupError, TypeError, AttributeError, *NOT_JSON) as e:
        return failed(FAILED, f"the model's reply is not what it should be: {e!r}")


def result(kind: Kind, said: Json, wants_json: bool = False) -> Json:
    match kind:
        case "embeddings":
            vectors = [row["embedding"] for row in said["data"]]
            return {"shape": [len(vectors), len(vectors[0]) if vectors else 0], "data": vectors} | _used(said)
        case "responses":
            return said
    message = said["choices"][0]["message"]
    made: Json = {"response": message.get("content")}
    if wants_json and isinstance(message.get("content"), str):
        with contextlib.suppress(*NOT_JSON):
            made["response"] = msgspec.json.decode(message["content"])
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_call(each["function"]) for each in calls]
    return made | _used(said)


def _used(said: Json) -> Json:
    return {"usage": said["usage"]} if said.get("usage") else {}


def _call(function: Json) -> Json:
    arguments: Any = function.get("arguments") or "{}"
    with contextlib.suppress(*NOT_JSON):
        arguments = msgspec.json.decode(arguments)
    return {"name": function.get("name"), "arguments": arguments}


class RunStream:
    """Chat's events in, Workers AI's out. Tools are told once, when they are whole."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._splitter = Splitter()
        self._tools: dict[int, Json] = {}

    def __aiter__(self) -> RunStream:
        return self

    async def __anext__(self) -> bytes:
        while True:
            events = self._splitter.push(await self._stream.__anext__())
            if made := b"".join(self._said(payload_of(event)[1]) for event in events):
                return made

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _said(self, payload: bytes) -> bytes:
        if payload in (b"", b"[DONE]"):
            return sse.DONE if payload else b""
        said = msgspec.json.decode(payload)
        if said.get("error"):
            return sse.data(failed(FAILED, problem_of(said).message))
        made = b"".join(self._choice(choice) for choice in said.get("choices") or ())
        return made + (sse.data({"response": "", "usage": said["usage"]}) if said.get("usage") else b"")

    def _choice(self, choice: Json) -> bytes:
        delta = choice.get("delta") or {}
        for piece in delta.get("tool_calls") or ():
            call = self._tools.setdefault(piece.get("index", 0), {"name": "", "arguments": ""})
            function = piece.get("function") or {}
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""
        made = sse.data({"response": delta["content"]}) if delta.get("content") else b""
        if choice.get("finish_reason") and self._tools:
            calls, self._tools = [_call(call) for call in self._tools.values()], {}
            made += sse.data({"response": "", "tool_calls": calls})
        return made
