"""Answer: a reply as Workers AI gives it: whole, in its envelope, or as events of its own."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from emberline.api import sse
from emberline.core.offload import offload
from emberline.gateway.call import Reply, Stream
from emberline.gateway.dialects.problems import problem_of, read_error
from emberline.gateway.run.question import Kind, WrittenQuestion
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


async def answered(asked: WrittenQuestion, reply: Reply) -> Reply:
    """The same reply in other words; a large one is rewritten in another process."""
    if isinstance(reply.body, bytes):
        reply.headers["content-type"] = "application/json"
        if reply.status < 400:
            about = asked.kind, reply.body, asked.wants_json
            succeeded, reply.body = await offload.run_by_size(len(reply.body), rewritten, *about)
            if not succeeded:
                reply.status = 502
        else:
            reply.body = sse.dumps(refused(reply))
            reply.status = 429 if is_busy(reply) else reply.status
    elif asked.kind == "chat/completions":
        reply.body = RunStream(reply.body)
    return reply


async def told(asked: WrittenQuestion, reply: Reply) -> Json:
    assert isinstance(reply.body, bytes)
    if reply.status >= 400:
        return refused(reply)
    return await offload.run_by_size(len(reply.body), read_reply, asked.kind, reply.body, asked.wants_json)


def refused(reply: Reply) -> Json:
    assert isinstance(reply.body, bytes)
    if is_busy(reply):
        return failed(BUSY, BUSY_TEXT)
    return failed(_CODES.get(reply.status, FAILED), read_error(reply.body).message)


def rewritten(kind: Kind, body: bytes, wants_json: bool) -> tuple[bool, bytes]:
    """Whether it is a good reply, and the reply in its envelope."""
    said = read_reply(kind, body, wants_json)
    return said["success"], sse.dumps(said)


def read_reply(kind: Kind, body: bytes, wants_json: bool) -> Json:
    try:
        return enveloped(result(kind, msgspec.json.decode(body), wants_json))
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
