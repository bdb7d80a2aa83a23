"""The layer that lets callers use the responses and conversations that providers store for them, and no others.

In requests it replaces the gateway's ids by the provider's, and in replies the provider's by the gateway's (see
ObjectIds). An id of another caller is answered like one that does not exist.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest, NotFound
from emberline.core.offload import offload
from emberline.gateway.core.errors import Forbidden, UpstreamBroken
from emberline.gateway.core.request import (
    VIRTUAL_PROVIDERS,
    GatewayReply,
    GatewayRequest,
    Handler,
    ReplyStream,
    RequestStep,
)
from emberline.gateway.core.request_body import check_duplicate_keys, replace_fields
from emberline.gateway.core.unified_endpoints import UnifiedEndpoint, find_unified_endpoint
from emberline.gateway.keys.object_ids import ObjectIds, StoredObject
from emberline.gateway.layers.permissions import ALLOW_MODEL_HINT, may_use_every_path
from emberline.gateway.providers.registry import ProviderRegistry
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire.event_splitter import EventSplitter, read_event_data

OBJECT_FAMILIES = ("responses", "responses/input_tokens", "responses/compact", "conversations")
_PROVIDER_ID = re.compile(r"[A-Za-z0-9_-]{1,256}")  # becomes part of a path
NOT_FOUND_HINT = "it was not created with this key on this gateway, or was deleted"


class _References(msgspec.Struct):
    """The fields of a request that refer to stored objects."""

    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None


class _ReplyObject(msgspec.Struct):
    """The fields of a response or a conversation that are ids of stored objects."""

    id: Any = None
    object: Any = None
    previous_response_id: Any = None
    conversation: Any = None

    def ids(self) -> list[str]:
        if not str(self.object).startswith(("response", "conversation")):
            return []  # an item of a conversation, or a reply in another format
        conversation = self.conversation.get("id") if isinstance(self.conversation, dict) else self.conversation
        found = (self.id, self.previous_response_id, conversation)
        return [id for id in found if isinstance(id, str) and _PROVIDER_ID.fullmatch(id)]


class _ReplyEvent(msgspec.Struct):
    response: _ReplyObject | None = None


_REFERENCES = msgspec.json.Decoder(_References)
_REPLY_OBJECT = msgspec.json.Decoder(_ReplyObject)
_REPLY_EVENT = msgspec.json.Decoder(_ReplyEvent)


class StoredObjectLayer:
    def __init__(self, ids: ObjectIds, registry: ProviderRegistry) -> None:
        self._ids = ids
        self._registry = registry

    def wrap(self, inner: Handler) -> Handler:
        def handle(call: GatewayRequest) -> Awaitable[GatewayReply]:
            return handle_objects(call) if self._has_objects(call) else inner(call)

        async def handle_objects(call: GatewayRequest) -> GatewayReply:
            known: dict[bytes, bytes] = {}  # the provider's id -> the caller's
            reply = await inner(await self._unwrap_request(call, known))
            alias = next((each.key for each in reversed(call.attempts) if each.outcome == "answered"), "")
            alias = alias or call.options.byok_alias or ""
            replacer = IdReplacer(self._ids, call, reply.provider or call.provider, alias or None, known)
            if isinstance(reply.body, bytes):
                replacer.add_ids(await offload.run_inline_if_small(len(reply.body), find_ids_in_reply, reply.body))
                reply.body = replacer.replace(reply.body)
                reply.headers.pop("content-length", None)
            else:
                reply.body = ReplacedStream(reply.body, replacer)
            return reply

        return handle

    def _has_objects(self, call: GatewayRequest) -> bool:
        """Return whether the request, or one of its steps, may create or name stored objects in a shared account."""
        steps = call.steps or (RequestStep(call.provider, call.model),)
        return any(self._step_has_objects(call, step) for step in steps)

    def _step_has_objects(self, call: GatewayRequest, step: RequestStep) -> bool:
        endpoint = call.endpoint if step.endpoint is None else step.endpoint.partition("?")[0]
        if call.is_dialect_endpoint or step.is_dialect_endpoint:
            unified = find_unified_endpoint(endpoint)
            return unified is not None and unified.family in OBJECT_FAMILIES
        if "responses" not in endpoint:
            return False
        provider = self._registry.find_provider(step.provider, call.settings)
        own = call if step.headers is None else call.with_changes(provider=step.provider, headers=step.headers)
        return not may_use_every_path(own, provider)

    async def _unwrap_request(self, call: GatewayRequest, known: dict[bytes, bytes]) -> GatewayRequest:
        unified = find_unified_endpoint(call.endpoint) if call.is_dialect_endpoint else None
        if unified is not None and unified.access == "owned":
            call = self._unwrap_path(call, unified, known)
        if call.steps:
            steps = [await self._unwrap_step(call, step, known) for step in call.steps]
            return call.with_changes(steps=tuple(steps))
        body = await self._unwrap_body(call, call.body, call.provider, known)
        return call if body is call.body else call.with_changes(body=body)

    def _unwrap_path(self, call: GatewayRequest, unified: UnifiedEndpoint, known: dict[bytes, bytes]) -> GatewayRequest:
        if unified.object_id:
            found = self._unwrap_id(call, unified.object_id, known)
            endpoint = call.endpoint.replace(unified.object_id, found.id, 1)
            options = replace(call.options, byok_alias=found.key_alias)
            stream = call.method == "GET" and "stream=true" in call.query.split("&")
            call = call.with_changes(provider=found.provider, endpoint=endpoint, options=options, stream=stream)
        if not call.identity.may_use_provider(call.provider):
            raise Forbidden(
                f"key {call.identity.name!r} may not use provider {call.provider}"[:300], hint=ALLOW_MODEL_HINT
            )
        return call

    async def _unwrap_step(self, call: GatewayRequest, step: RequestStep, known: dict[bytes, bytes]) -> RequestStep:
        if step.body is None or not self._step_has_objects(call, step):
            return step
        body = await self._unwrap_body(call, step.body, step.provider, known)
        if body is step.body:
            return step
        return msgspec.structs.replace(step, body=body, body_fields=None, body_summary=None)

    async def _unwrap_body(self, call: GatewayRequest, body: bytes, provider: str, known: dict[bytes, bytes]) -> bytes:
        """Return the body with the provider's ids."""
        if not any(name in body for name in (b'"previous_response_id"', b'"conversation"', b'"background"', b"\\u")):
            return body
        references = await offload.run_inline_if_small(len(body), read_references, body)
        if references.background is True and call.identity.kind != "token":
            raise InvalidRequest(
                "background must not be true without a gateway token: the usage of such a response cannot be counted",
                param="background",
                hint="send the request without background",
            )
        changes: dict[str, Any] = {}
        if isinstance(references.previous_response_id, str):
            found = self._unwrap_id(call, references.previous_response_id, known, "previous_response_id")
            _check_provider(found, provider, "previous_response_id")
            changes["previous_response_id"] = found.id
        conversation = references.conversation
        id = conversation.get("id") if isinstance(conversation, dict) else conversation
        if isinstance(id, str):
            found = self._unwrap_id(call, id, known, "conversation")
            _check_provider(found, provider, "conversation")
            changes["conversation"] = {**conversation, "id": found.id} if isinstance(conversation, dict) else found.id
        return await offload.run_inline_if_small(len(body), _replace_references, body, changes) if changes else body

    def _unwrap_id(
        self, call: GatewayRequest, id: str, known: dict[bytes, bytes], param: str | None = None
    ) -> StoredObject:
        if (found := self._ids.unwrap(id, call)) is None:
            what = "conversation" if id.startswith("conv_") else "response"
            raise NotFound(f"{what} {id[:200]!r} does not exist", param=param, hint=NOT_FOUND_HINT)
        known[found.id.encode()] = id.encode()
        return found


def _check_provider(found: StoredObject, provider: str, param: str) -> None:
    if provider not in VIRTUAL_PROVIDERS and found.provider != provider:
        raise InvalidRequest(
            f"{param} names an object of provider {found.provider!r}, but the model belongs to provider {provider!r}",
            param=param,
            hint="use a model of the same provider, or send the conversation as input",
        )


def read_references(body: bytes) -> _References:
    """Return the references of a request. Raise InvalidRequest if an object in the body has a field twice."""
    try:
        references = _REFERENCES.decode(body)
    except JSON_DECODE_ERRORS:
        return _References()  # the provider rejects the body
    check_duplicate_keys(body)
    return references


def _replace_references(body: bytes, changes: dict[str, Any]) -> bytes:
    return replace_fields(body, **changes)


def find_ids_in_reply(body: bytes) -> list[str]:
    """Return the ids of the response or conversation in a whole reply, and those that it refers to.

    Only the fields of the provider count. A caller must not get an id for a text that it made the model write.
    """
    try:
        return _REPLY_OBJECT.decode(body).ids()
    except JSON_DECODE_ERRORS:
        return []


def find_ids_in_event(event: bytes) -> list[str]:
    """The same for an event of a stream, in which the response is the field `response`."""
    try:
        found = _REPLY_EVENT.decode(read_event_data(event) or b"{}").response
    except JSON_DECODE_ERRORS:
        return []
    return [] if found is None else found.ids()


class IdReplacer:
    """Replaces the provider's ids in a reply by the caller's."""

    def __init__(
        self, ids: ObjectIds, call: GatewayRequest, provider: str, alias: str | None, known: dict[bytes, bytes]
    ) -> None:
        """`known`: the provider's ids that the request names -> the caller's."""
        self._ids = ids
        self._call = call
        self._provider = provider
        self._alias = alias
        self._known = known

    def add_ids(self, ids: list[str]) -> None:
        for id in ids:
            if id.encode() not in self._known:
                found = StoredObject(id, self._provider, self._alias)
                self._known[id.encode()] = self._ids.wrap(found, self._call).encode()

    def replace(self, data: bytes) -> bytes:
        for provider_id, own_id in self._known.items():
            data = data.replace(b'"%b"' % provider_id, b'"%b"' % own_id)
        return data


class ReplacedStream:
    """A stream of whole events with the provider's ids replaced."""

    def __init__(self, stream: ReplyStream, replacer: IdReplacer) -> None:
        self._stream = stream
        self._replacer = replacer
        self._has_ids = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._stream.__anext__()
        if not self._has_ids:  # the first event has the response's id; later ones repeat it
            ids = [id for event in EventSplitter(UpstreamBroken).push(chunk) for id in find_ids_in_event(event)]
            self._has_ids = bool(ids)
            self._replacer.add_ids(ids)
        return self._replacer.replace(chunk)

    async def aclose(self) -> None:
        await self._stream.aclose()
