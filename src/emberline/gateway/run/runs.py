"""Runs: /ai/run, as Cloudflare's clients call it: a model by its name, over any provider. A request waits while its
provider has no room, unless it says that it will not; one that is queued is answered later."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import parse_qs, unquote

import msgspec

from emberline.api import sse
from emberline.core.clock import Clock
from emberline.core.errors import EmberlineError, InvalidRequest, MethodNotAllowed, NotFound
from emberline.core.offload import offload
from emberline.gateway.call import Reply
from emberline.gateway.errors import Forbidden
from emberline.gateway.gateway import Gateway, Request
from emberline.gateway.keys.identity import Identity
from emberline.gateway.options import Options, asking
from emberline.gateway.paths import DEFAULT, Target
from emberline.gateway.refusal import error_reply
from emberline.gateway.routes.named import resolve
from emberline.gateway.run.answer import Json, answered, enveloped, failed, is_busy
from emberline.gateway.run.batch import PackedRequests
from emberline.gateway.run.question import WrittenQuestion, written
from emberline.gateway.run.queue import Queue, checked_requests
from emberline.gateway.settings import Settings
from emberline.net.notjson import NOT_JSON

LARGEST = 10 << 20  # bytes of a batch
LONGEST_ID = 1000  # characters of a batch's id: all that are known are shorter
JSON = {"content-type": "application/json"}
PAUSES = (0.25, 0.5, 1.0, 2.0)  # seconds before a provider without room is asked again; then always the last
_PATH = re.compile(r"(?:/client/v4)?/accounts/(?P<account>[^/]+)/ai/run(?:/(?P<model>.+))?")
_NATIVE = "workers-ai"  # speaks like this itself


class Outline(msgspec.Struct):
    """What is decided by of a body."""

    model: str
    request_id: str | None  # of a batch that is asked about
    options: Json


class _Asked(msgspec.Struct):
    account: str
    gateway: str
    model: str
    named: str  # the model, if the path names it; "": the body does
    request_id: str | None
    queued: bool
    rejects: bool  # if there is no room
    identity: Identity
    settings: Settings


class Runs:
    def __init__(self, gateway: Gateway, queue: Queue, clock: Clock) -> None:
        self._gateway = gateway
        self._queue = queue
        self._clock = clock

    @staticmethod
    def owns(path: str) -> bool:
        return _PATH.fullmatch(path) is not None

    async def answer(self, request: Request) -> Reply:
        try:
            asked = await self._read(request)
            if asked.request_id is not None:
                found = await self._queue.look(asked.account, asked.request_id, asked.identity)
                return Reply(200, {**JSON}, await asyncio.to_thread(sse.dumps, enveloped(found)), ended="complete")
            if asked.queued:
                return _reply(enveloped(await self._queued(asked, request)))
            return await self._now(asked, request)
        except EmberlineError as e:
            told = error_reply("raw", e)
            told.headers["content-type"] = "application/json"
            code = {404: 7002, 400: 5006, 401: 10000, 403: 10000, 429: 2003}.get(told.status, 3043)
            told.body = sse.dumps(failed(code, str(e)))
            return told

    async def _read(self, request: Request) -> _Asked:
        if request.method != "POST":
            raise MethodNotAllowed(f"/ai/run takes POST, not {request.method[:20]}", allowed="POST")
        match = _PATH.fullmatch(request.path)
        if match is None:
            raise NotFound(f"there is nothing at {request.path[:200]!r}")
        named = unquote(match["model"] or "")
        outline = await offload.run_by_size(len(request.body), read_outline, request.body, named)
        account = match["account"]
        gateway = Options.read(request.headers).gateway_id or DEFAULT
        identity, settings = await self._gateway.entered(Target("plain", account, gateway), request.headers)
        queued, rejects = _wishes(outline.options, request.query)
        about = outline.model, named, outline.request_id
        return _Asked(account, gateway, *about, queued, rejects, identity, settings)

    async def _queued(self, asked: _Asked, request: Request) -> Json:
        who, (provider, model) = asked.identity, resolve(asked.model, asked.settings)
        if not who.may_enter(asked.account, asked.gateway) or not who.may_use(provider, model):
            raise Forbidden(f"key {who.name!r} may not use {provider}/{model} here"[:300])
        if len(request.body) > LARGEST:
            raise InvalidRequest(f"a batch has at most {LARGEST} bytes", param="requests")
        requests = await offload.run_by_size(len(request.body), read_batch, request.body, asked.named)
        wishes = asking(request.headers)
        return (await self._queue.add(asked.account, asked.gateway, asked.model, who.key_id, requests, wishes)).brief

    async def _now(self, asked: _Asked, request: Request) -> Reply:
        provider, model = resolve(asked.model, asked.settings)
        headers = {**request.headers, "cf-aig-gateway-id": asked.gateway}
        if asked.rejects:
            headers["cf-aig-max-attempts"] = "1"
        if provider == _NATIVE:
            path = f"/v1/{asked.account}/{asked.gateway}/{provider}/{model}"
            query = request.query
            if asked.rejects and "rejectIfBusy=" not in query:
                query = f"{query}&rejectIfBusy=true".lstrip("&")
            body = await offload.run_by_size(len(request.body), read_native, request.body, asked.named)
            return await self._gateway.answer(Request("POST", path, query, headers, body))
        told = await offload.run_by_size(len(request.body), read_question, request.body, asked.named)
        path = f"/accounts/{asked.account}/ai{told.path}"
        made = Request("POST", path, "", headers, told.body)
        until = self._clock.now() + asked.settings.timeouts.total
        for tried in range(1 << 20):
            reply = await self._gateway.answer(made)
            pause = PAUSES[min(tried, len(PAUSES) - 1)]
            if not is_busy(reply) or asked.rejects or self._clock.now() + pause >= until:
                return await _given(told, reply)
            await reply.close()
            await asyncio.sleep(pause)
        raise AssertionError("not reached")


def _read(body: bytes, named: str) -> tuple[str, Json, Json]:
    """The model, its input, and wishes. `named`: the model, where the path names it."""
    try:
        said = msgspec.json.decode(body, type=dict)
    except NOT_JSON as e:
        raise InvalidRequest(f"the body is not a JSON object: {e}") from e
    return (named, said, {}) if named else _named(said)


# Each reads the body anew, so that no more than its result comes back from another process.


def read_outline(body: bytes, named: str) -> Outline:
    model, said, options = _read(body, named)
    id = str(said["request_id"])[:LONGEST_ID] if "request_id" in said else None
    return Outline(model, id, {name: wish if isinstance(wish, bool) else None for name, wish in options.items()})


def read_question(body: bytes, named: str) -> WrittenQuestion:
    model, said, _ = _read(body, named)
    return written(model, said)


def read_native(body: bytes, named: str) -> bytes:
    return msgspec.json.encode(_read(body, named)[1])


def read_batch(body: bytes, named: str) -> PackedRequests:
    model, said, _ = _read(body, named)
    if wrong := said.keys() - {"requests"}:
        raise InvalidRequest(f"{min(wrong)[:80]!r} has no place beside requests", param=min(wrong)[:80])
    return checked_requests(model, said.get("requests"))


_WISHES = ("queueRequest", "rejectIfBusy")


def _named(said: Json) -> tuple[str, Json, Json]:
    """A model, its input, and wishes: of a body that has all three."""
    model, given, options = said.get("model"), said.get("input") or Json(), said.get("options") or Json()
    if not (model and isinstance(model, str) and isinstance(given, dict) and isinstance(options, dict)):
        raise InvalidRequest("the body must have a model and its input", param="model")
    if wrong := (said.keys() - {"model", "input", "options"}) | (options.keys() - {*_WISHES}):
        raise InvalidRequest(f"{min(wrong)[:80]!r} is not known beside model and input", param=min(wrong)[:80])
    return model, given, options


def _wishes(options: Json, query: str) -> list[bool]:
    said = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
    for name in _WISHES:
        if options.get(name, False) not in (True, False) or said.get(name, "false") not in ("true", "false"):
            raise InvalidRequest(f"{name} must be true or false", param=name)
    return [options.get(name) is True or said.get(name) == "true" for name in _WISHES]


async def _given(asked: WrittenQuestion, reply: Reply) -> Reply:
    try:
        return await answered(asked, reply)
    except BaseException:  # nobody else has it to close
        await reply.close()
        raise


def _reply(said: Json) -> Reply:
    return Reply(200, {**JSON}, sse.dumps(said), ended="complete")
