"""StoredResponses: what the Responses API keeps between requests, and the HTTP calls that read and delete it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec

from emberline.core.errors import InvalidRequest, MethodNotAllowed, NotFound
from emberline.core.offload import offload
from emberline.net.notjson import NOT_JSON
from emberline.server.exchange import Exchange
from emberline.server.worker.response_store import ResponseStore, StoredResponse

PATH = "/v1/responses"
BELOW = f"{PATH}/"
ITEMS = "/input_items"
CANCEL = "/cancel"
MAX_ITEMS = 100

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


class _Asked(msgspec.Struct):
    previous_response_id: str | None = None
    store: bool | None = None
    input: Any = None


class ReadRequest(msgspec.Struct):
    """A request as another process reads it."""

    previous_response_id: str | None
    store: bool | None
    items: bytes  # the input, as the JSON of a list of items


class StoredResponses:
    def __init__(self, store: ResponseStore | None, tenant_of: Callable[[Exchange], str]) -> None:
        """`store`: None where nothing is kept. `tenant_of`: the tenant of a request that carries its client's key."""
        self._store = store
        self._tenant_of = tenant_of

    @property
    def keeps(self) -> bool:
        return self._store is not None

    async def completed(self, body: bytes, tenant: str) -> tuple[bytes, Memory | None]:
        """The request's body with the conversation that it continues, and where its reply is kept; None: nowhere."""
        asked = await offload.run_by_size(len(body), read_request, body)
        if asked is None:
            return body, None  # refused by the protocol's parser, which names the field
        given = asked.items
        if asked.previous_response_id is not None:
            before = await self._found(tenant, asked.previous_response_id, "previous_response_id")
            body, given = await offload.run_by_size(len(body), joined, body, before.items, given)
        wanted = asked.store is not False and self._store is not None
        return body, Memory(self._store, tenant, given) if wanted and self._store is not None else None

    async def answer(self, x: Exchange) -> None:
        """GET and DELETE of one response, and GET of its input items. A response that is stored is over: no cancel."""
        id_ = x.path.removeprefix(BELOW)
        if x.method == "DELETE":
            await self._found(self._tenant_of(x), id_)
            assert self._store is not None
            await asyncio.to_thread(self._store.delete, self._tenant_of(x), id_)
            await x.json({"id": id_, "object": "response", "deleted": True})
        elif x.method == "POST" and id_.endswith(CANCEL):
            await self._found(self._tenant_of(x), id_.removesuffix(CANCEL))
            hint = "it has ended; background: true, whose responses could be cancelled, is not served"
            raise InvalidRequest("Cannot cancel a synchronous response.", hint=hint)  # OpenAI's words, as vLLM's
        elif x.method not in ("GET", "HEAD"):
            raise MethodNotAllowed(f"{PATH}/ID takes GET and DELETE, not {x.method[:20]}", allowed="GET, DELETE")
        elif id_.endswith(ITEMS):
            found = await self._found(self._tenant_of(x), id_.removesuffix(ITEMS))
            await x.json(_listed(found.input, x.query))
        else:
            if "stream=true" in x.query:
                raise InvalidRequest("a stored response is not streamed", param="stream", hint="leave stream out")
            await x.json((await self._found(self._tenant_of(x), id_)).body)

    async def _found(self, tenant: str, id_: str, param: str | None = None) -> StoredResponse:
        if self._store is None:
            hint = "start the server with --response-store FILE, on one machine the same for all workers of a router"
            raise InvalidRequest("responses are not stored here", param=param, hint=hint)
        if (found := await asyncio.to_thread(self._store.get, tenant, id_)) is None:
            hint = "it was never stored, has been deleted, made room for newer ones, or belongs to another API key"
            raise NotFound(f"Response with id {id_[:200]!r} not found.", param=param, hint=hint)
        return found


class Memory:
    """Where one reply is kept."""

    def __init__(self, store: ResponseStore, tenant: str, given: bytes) -> None:
        """`given`: the whole conversation, as the JSON of a list of items."""
        self._store = store
        self._tenant = tenant
        self._given = given

    async def keep(self, body: dict[str, Any]) -> None:
        await asyncio.to_thread(self._store.put, self._tenant, body, msgspec.Raw(self._given))


def read_request(body: bytes) -> ReadRequest | None:
    """None: it is not one."""
    try:
        asked = msgspec.json.decode(body, type=_Asked)
    except NOT_JSON:
        return None
    return ReadRequest(asked.previous_response_id, asked.store, msgspec.json.encode(_as_items(asked.input)))


def joined(body: bytes, before: list[dict[str, Any]], given: bytes) -> tuple[bytes, bytes]:
    """The request's body with the conversation before it, and that conversation."""
    items = msgspec.json.encode([*before, *_ITEMS.decode(given)])
    return msgspec.json.encode({**_FIELDS.decode(body), "input": msgspec.Raw(items)}), items


def _as_items(given: Any) -> list[dict[str, Any]]:
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        return []  # refused by the protocol's parser
    return [{"type": "message", **item} if "role" in item else item for item in items]


def _listed(items: list[dict[str, Any]], query: str) -> dict[str, Any]:
    asked = {name: values[-1] for name, values in parse_qs(query).items()}
    limit, order = asked.get("limit", "20"), asked.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_ITEMS):
        raise InvalidRequest(f"limit is {limit[:20]!r}; it must be in [1, {MAX_ITEMS}]", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order[:20]!r}; it must be asc or desc", param="order")
    named = [{"id": f"item_{at}", **item} for at, item in enumerate(items)]
    ordered = named if order == "asc" else named[::-1]
    if (after := asked.get("after")) is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise InvalidRequest(f"after is {after[:100]!r}, which is no item of this response", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    shown = ordered[: int(limit)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, "has_more": len(ordered) > len(shown), **ends}
