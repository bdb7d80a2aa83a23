"""StoredResponses: stores responses of the Responses API, and handles requests that read or delete them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec

from emberline.core.errors import InvalidRequest, MethodNotAllowed, NotFound
from emberline.core.fair_threads import FairThreads
from emberline.core.offload import offload
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.server.exchange import Exchange
from emberline.worker.response_store import ResponseStore, StoredResponse

RESPONSES_PATH = "/v1/responses"
RESPONSE_PATH_PREFIX = f"{RESPONSES_PATH}/"
INPUT_ITEMS_SUFFIX = "/input_items"
CANCEL_SUFFIX = "/cancel"
MAX_LISTED_ITEMS = 100
STORE_THREADS = 2

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


class _RequestFields(msgspec.Struct):
    previous_response_id: str | None = None
    store: bool | None = None
    input: Any = None


class StorageFields(msgspec.Struct):
    """The fields of a request that concern stored responses, in the form in which a child process returns them."""

    previous_response_id: str | None
    store: bool | None
    items: bytes  # the input as JSON: a list of items


class StoredResponses:
    def __init__(self, store: ResponseStore | None, tenant_of: Callable[[Exchange], str]) -> None:
        """`store` is None if responses are not stored. `tenant_of` returns the tenant (API key) of a request."""
        self._store = store
        self._tenant_of = tenant_of
        self._threads = FairThreads("reads and writes of stored responses", STORE_THREADS)

    @property
    def is_enabled(self) -> bool:
        return self._store is not None

    async def expand_request(self, body: bytes, tenant: str) -> tuple[bytes, ResponseSaver | None]:
        """Return the body with the earlier conversation put before its input, and a ResponseSaver.

        Return None instead of a ResponseSaver if the response is not to be stored. A request with previous_response_id
        raises NotFound if that id is unknown, and InvalidRequest if this server stores no responses.
        """
        fields = await offload.run_inline_if_small(len(body), read_storage_fields, body)
        if fields is None:
            return body, None  # the protocol's parser rejects the body and names the field
        given = fields.items
        if fields.previous_response_id is not None:
            before = await self._get_response(tenant, fields.previous_response_id, "previous_response_id")
            body, given = await offload.run_inline_if_small(len(body), prepend_conversation, body, before.items, given)
        if self._store is None or fields.store is False:
            return body, None
        return body, ResponseSaver(self._store, self._threads, tenant, given)

    async def handle(self, exchange: Exchange) -> None:
        """Reply to GET or DELETE of a response and to GET of its input items. Reject POST to cancel a response."""
        id_ = exchange.path.removeprefix(RESPONSE_PATH_PREFIX)
        if exchange.method == "DELETE":
            await self._get_response(self._tenant_of(exchange), id_)
            assert self._store is not None
            tenant = self._tenant_of(exchange)
            await self._threads.run(tenant, self._store.delete, tenant, id_)
            await exchange.reply_json({"id": id_, "object": "response", "deleted": True})
        elif exchange.method == "POST" and id_.endswith(CANCEL_SUFFIX):
            await self._get_response(self._tenant_of(exchange), id_.removesuffix(CANCEL_SUFFIX))
            hint = "the response has ended; background responses, which can be cancelled, are not supported"
            raise InvalidRequest("Cannot cancel a synchronous response.", hint=hint)  # the message of OpenAI and vLLM
        elif exchange.method not in ("GET", "HEAD"):
            raise MethodNotAllowed(
                f"{RESPONSES_PATH}/ID accepts GET and DELETE, not {exchange.method[:20]}", allowed="GET, DELETE"
            )
        elif id_.endswith(INPUT_ITEMS_SUFFIX):
            found = await self._get_response(self._tenant_of(exchange), id_.removesuffix(INPUT_ITEMS_SUFFIX))
            await exchange.reply_json(_list_items(found.input, exchange.query))
        else:
            if "stream=true" in exchange.query:
                raise InvalidRequest("a stored response cannot be streamed", param="stream", hint="remove stream=true")
            await exchange.reply_json((await self._get_response(self._tenant_of(exchange), id_)).body)

    async def _get_response(self, tenant: str, id_: str, param: str | None = None) -> StoredResponse:
        if self._store is None:
            hint = "start the server with --response-store FILE; workers of one router share a file on one machine"
            raise InvalidRequest("this server does not store responses", param=param, hint=hint)
        if (found := await self._threads.run(tenant, self._store.get, tenant, id_)) is None:
            hint = "it was not stored, was deleted, was evicted by newer ones, or belongs to another API key"
            raise NotFound(f"Response with id {id_[:200]!r} not found.", param=param, hint=hint)
        return found


class ResponseSaver:
    """Saves one response, with the conversation before it."""

    def __init__(self, store: ResponseStore, threads: FairThreads, tenant: str, items: bytes) -> None:
        """`items` is the conversation before the response: a JSON list."""
        self._store = store
        self._threads = threads
        self._tenant = tenant
        self._items = items

    async def save(self, body: dict[str, Any]) -> None:
        await self._threads.run(self._tenant, self._store.put, self._tenant, body, msgspec.Raw(self._items))


def read_storage_fields(body: bytes) -> StorageFields | None:
    """Return the request's fields that concern stored responses; None if the body is not a valid request."""
    try:
        fields = msgspec.json.decode(body, type=_RequestFields)
    except JSON_DECODE_ERRORS:
        return None
    return StorageFields(fields.previous_response_id, fields.store, msgspec.json.encode(_as_input_items(fields.input)))


def prepend_conversation(body: bytes, earlier_items: list[dict[str, Any]], input_items: bytes) -> tuple[bytes, bytes]:
    """Put `earlier_items` before the input of a request. Return the new body and the whole conversation.

    Both are JSON."""
    items = msgspec.json.encode([*earlier_items, *_ITEMS.decode(input_items)])
    return msgspec.json.encode({**_FIELDS.decode(body), "input": msgspec.Raw(items)}), items


def _as_input_items(input_field: Any) -> list[dict[str, Any]]:
    items = [{"role": "user", "content": input_field}] if isinstance(input_field, str) else input_field
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        return []  # the protocol's parser rejects the body
    return [{"type": "message", **item} if "role" in item else item for item in items]


def _list_items(items: list[dict[str, Any]], query: str) -> dict[str, Any]:
    given = {name: values[-1] for name, values in parse_qs(query).items()}
    limit, order = given.get("limit", "20"), given.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LISTED_ITEMS):
        raise InvalidRequest(f"limit is {limit[:20]!r}; it must be in [1, {MAX_LISTED_ITEMS}]", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order[:20]!r}; it must be asc or desc", param="order")
    with_ids = [{"id": f"item_{i}", **item} for i, item in enumerate(items)]
    ordered = with_ids if order == "asc" else with_ids[::-1]
    if (after := given.get("after")) is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            hint = "use the id of an item from the list without after"
            raise InvalidRequest(f"after is {after[:100]!r}, which is not an input item's id", param="after", hint=hint)
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, "has_more": len(ordered) > len(page), **ends}
