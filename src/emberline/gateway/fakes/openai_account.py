"""FakeOpenAIAccount: the files, batches, responses and conversations of one account, and OpenAI's endpoints for media.

As at OpenAI, everyone with the account's key sees all of its objects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from emberline.gateway.fakes.reply import CREATED, FakeReply

Json = dict[str, Any]
JSON_TYPE = "application/json"
_OBJECT = re.compile(r"(?:.*/)?v1/(?P<kind>files|batches|responses|conversations)(?:/(?P<id>[^/]+)(?P<rest>/.+)?)?")
_MEDIA = re.compile(
    r"(?:.*/)?v[12]/(?P<endpoint>audio/\w+|images/\w+|moderations|rerank|responses/(?:input_tokens|compact))"
)
_FORM_FIELD = re.compile(rb'name="(\w+)"(?:; filename="[^"]*")?\r\n(?:[^\r\n]+\r\n)*\r\n(.*?)\r\n--', re.DOTALL)
_PREFIXES = {"files": "file-", "batches": "batch_", "conversations": "conv_"}
SPEECH = b"ID3 fake audio"


@dataclass(frozen=True, slots=True)
class AccountReply:
    status: int
    content_type: str
    body: bytes


@dataclass(slots=True)
class FakeOpenAIAccount:
    objects: dict[str, Json] = field(default_factory=dict)  # by id
    _count: int = 0

    def answer(self, method: str, path: str, body: bytes, content_type: str) -> AccountReply | None:
        """Return the reply to a request, or None if it is not for one of the account's endpoints."""
        path = path.partition("?")[0].strip("/")
        if method == "POST" and (media := _MEDIA.fullmatch(path)) is not None:
            return _answer_media(media["endpoint"], body, content_type)
        match = _OBJECT.fullmatch(path)
        if match is None or (match["kind"] == "responses" and match["id"] is None):
            return None
        if match["id"] is None:
            return self._list_or_create(method, match["kind"], body, content_type)
        return self._use_object(method, match["id"], match["rest"] or "", body)

    def add_response(self, reply: FakeReply, request: Json) -> None:
        """Give the response an id of its own, and keep it."""
        reply.response_id = self._next_id("resp_")
        reply.response_fields = {
            name: {"id": request[name]} if name == "conversation" and isinstance(request[name], str) else request[name]
            for name in ("previous_response_id", "conversation", "metadata")
            if name in request
        }
        self.objects[reply.response_id] = reply.make_response_object()

    def _next_id(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}fake{self._count}"

    def _list_or_create(self, method: str, kind: str, body: bytes, content_type: str) -> AccountReply:
        if method == "GET":
            found = [each for id, each in self.objects.items() if id.startswith(_PREFIXES[kind])]
            return _json_reply({"object": "list", "data": found, "has_more": False})
        fields = _read_fields(body, content_type)
        id = self._next_id(_PREFIXES[kind])
        created: Json = {"id": id, "object": kind.rstrip("s"), "created_at": CREATED}
        match kind:
            case "files":
                content = fields.get("file", "")
                created |= {"bytes": len(content), "filename": "f", "purpose": fields.get("purpose"), "status": "ok"}
                created["content"] = content
            case "batches":
                created |= {**fields, "object": "batch", "status": "validating"}
            case "conversations":
                created |= {"metadata": fields.get("metadata") or {}, "items": fields.get("items") or []}
        self.objects[id] = created
        return _json_reply(created)

    def _use_object(self, method: str, id: str, rest: str, body: bytes) -> AccountReply:
        found = self.objects.get(id)
        if found is None:
            return _json_reply({"error": {"message": f"no object {id}", "type": "invalid_request_error"}}, 404)
        if method == "DELETE" and not rest:
            del self.objects[id]
            return _json_reply({"id": id, "object": f"{found['object']}.deleted", "deleted": True})
        match rest:
            case "/content":
                return AccountReply(200, "application/octet-stream", found["content"].encode())
            case "/cancel":
                found["status"] = "cancelled"
            case "/input_items" | "/items":
                if method == "POST":
                    found["items"] += _read_fields(body, JSON_TYPE)["items"]
                items = [{"id": f"msg_{i}", **item} for i, item in enumerate(found.get("items", []))]
                return _json_reply(
                    {"object": "list", "data": items, "has_more": False, "first_id": None, "last_id": None}
                )
        return _json_reply(found)


def _answer_media(endpoint: str, body: bytes, content_type: str) -> AccountReply:
    fields = _read_fields(body, content_type)
    match endpoint:
        case "audio/speech":
            return AccountReply(200, "audio/mpeg", SPEECH)
        case "audio/transcriptions" | "audio/translations":
            return _json_reply({"text": f"{fields.get('model')} heard {len(fields.get('file', ''))} bytes"})
        case "moderations":
            return _json_reply({"id": "modr_1", "model": fields.get("model", "omni"), "results": []})
        case "rerank":
            results = [{"index": i, "relevance_score": 0.5} for i, _ in enumerate(fields.get("documents", []))]
            return _json_reply({"id": "rerank-1", "model": fields.get("model"), "results": results})
        case "responses/input_tokens":
            return _json_reply({"object": "response.input_tokens", "input_tokens": 11})
        case "responses/compact":
            return _json_reply({"id": "resp_compact", "object": "response.compaction", "output": []})
    return _json_reply({"created": CREATED, "data": [{"b64_json": "aW1hZ2U="}], "model": fields.get("model")})


def _read_fields(body: bytes, content_type: str) -> Json:
    if content_type.startswith("multipart/"):
        return {name.decode(): value.decode("latin-1") for name, value in _FORM_FIELD.findall(body)}
    return msgspec.json.decode(body) if body else {}


def _json_reply(value: Json, status: int = 200) -> AccountReply:
    return AccountReply(status, JSON_TYPE, msgspec.json.encode(value))
