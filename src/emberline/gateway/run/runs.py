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
from emberline.gateway.call import Reply
from emberline.gateway.errors import Forbidden
from emberline.gateway.gateway import Gateway, Request
from emberline.gateway.keys.identity import Identity
from emberline.gateway.options import Options, asking
from emberline.gateway.paths import DEFAULT, Target
from emberline.gateway.refusal import error_reply
from emberline.gateway.routes.named import resolve
from emberline.gateway.run.answer import Json, answered, enveloped, failed, is_busy
from emberline.gateway.run.question import Question, question
from emberline.gateway.run.queue import Queue
from emberline.gateway.settings import Settings
from emberline.net.notjson import NOT_JSON

LARGEST = 10 << 20  # bytes of a batch
PAUSES = (0.25, 0.5, 1.0, 2.0)  # seconds before a provider without room is asked again; then always the last
_PATH = re.compile(r"(?:/client/v4)?/accounts/(?P<account>[^/]+)/ai/run(?:/(?P<model>.+))?")
_NATIVE = "workers-ai"  # speaks like this itself


class _Asked(msgspec.Struct):
    account: str
    gateway: str
    model: str
    input: Json
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
            if "request_id" in asked.input:
                id = str(asked.input["request_id"])
                return _reply(enveloped(await self._queue.look(asked.account, id, asked.identity)))
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
        try:
            said = msgspec.json.decode(request.body, type=dict)
        except NOT_JSON as e:
            raise InvalidRequest(f"the body is not a JSON object: {e}") from e
        model, options = unquote(match["model"] or ""), Json()
        if not model:
            model, said, options = _named(said)
        account = match["account"]
        gateway = Options.read(request.headers).gateway_id or DEFAULT
        identity, settings = await self._gateway.entered(Target("plain", account, gateway), request.headers)
        queued, rejects = _wishes(options, request.query)
        return _Asked(account, gateway, model, said, queued, rejects, identity, settings)

    async def _queued(self, asked: _Asked, request: Request) -> Json:
        who, (provider, model) = asked.identity, resolve(asked.model, asked.settings)
        if not who.may_enter(asked.account, asked.gateway) or not who.may_use(provider, model):
            raise Forbidden(f"key {who.name!r} may not use {provider}/{model} here"[:300])
        if len(request.body) > LARGEST:
            raise InvalidRequest(f"a batch has at most {LARGEST} bytes", param="requests")
        wrong = asked.input.keys() - {"requests"}
        if wrong:
            raise InvalidRequest(f"{min(wrong)[:80]!r} has no place beside requests", param=min(wrong)[:80])
        requests, wishes = asked.input.get("requests"), asking(request.headers)
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
            return await self._gateway.answer(Request("POST", path, query, headers, msgspec.json.encode(asked.input)))
        told = question(asked.model, asked.input)
        path = f"/accounts/{asked.account}/ai{told.path}"
        made = Request("POST", path, "", headers, msgspec.json.encode(told.body))
        until = self._clock.now() + asked.settings.timeouts.total
        for tried in range(1 << 20):
            reply = await self._gateway.answer(made)
            pause = PAUSES[min(tried, len(PAUSES) - 1)]
            if not is_busy(reply) or asked.rejects or self._clock.now() + pause >= until:
                return await _given(told, reply)
            await reply.close()
            await asyncio.sleep(pause)
        raise AssertionError("not reached")


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


async def _given(asked: Question, reply: Reply) -> Reply:
    try:
        return answered(asked, reply)
    except BaseException:  # nobody else has it to close
        await reply.close()
        raise


def _reply(said: Json) -> Reply:
    return Reply(200, {"content-type": "application/json"}, sse.dumps(said), ended="complete")
