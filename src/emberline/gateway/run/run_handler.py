"""RunHandler: the endpoint /ai/run of Cloudflare's Workers AI, for the models of any provider.

A request waits while its provider is out of capacity, unless the request sets rejectIfBusy. A request with queueRequest
becomes a batch, whose results the client fetches later.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import NamedTuple
from urllib.parse import parse_qs, unquote

import msgspec

from emberline.core.clock import Clock
from emberline.core.errors import EmberlineError, InvalidRequest, MethodNotAllowed, NotFound
from emberline.core.offload import offload
from emberline.gateway.core.errors import Forbidden
from emberline.gateway.core.identity import Identity
from emberline.gateway.core.options import RequestOptions, select_option_headers
from emberline.gateway.core.paths import DEFAULT_NAME, RequestTarget
from emberline.gateway.core.request import GatewayReply
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.error_replies import error_reply
from emberline.gateway.gateway import BodyHandler, Gateway, InboundRequest
from emberline.gateway.routes.model_names import resolve_model
from emberline.gateway.run.batch_queue import BatchQueue, check_requests
from emberline.gateway.run.batch_store import PackedRequests
from emberline.gateway.run.run_replies import (
    Json,
    build_failure_envelope,
    build_success_envelope,
    is_provider_busy,
    to_run_reply,
)
from emberline.gateway.run.run_request import EncodedRequest, encode_request
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire import sse

MAX_BATCH_BYTES = 10 << 20
MAX_BATCH_ID_CHARS = 1000  # valid ids are shorter
JSON_HEADERS = {"content-type": "application/json"}
RETRY_DELAYS_S = (0.25, 0.5, 1.0, 2.0)  # while a provider is out of capacity; the last one repeats
_PATH = re.compile(r"(?:/client/v4)?/accounts/(?P<account>[^/]+)/ai/run(?:/(?P<model>.+))?")
_NATIVE = "workers-ai"  # the provider whose own protocol this is


class RunOutline(msgspec.Struct):
    """The fields of a body that decide how the request is handled."""

    model: str
    request_id: str | None  # id of the batch whose results are requested
    options: Json


class _RunRequest(msgspec.Struct):
    account: str
    gateway: str
    model: str
    path_model: str  # the model, if the path names it; "": the body names it
    request_id: str | None
    queued: bool
    rejects_if_busy: bool
    identity: Identity
    settings: GatewaySettings


class _RunCaller(NamedTuple):
    """What the path and the headers of a request say."""

    account: str
    gateway: str
    path_model: str  # "": the body names the model
    identity: Identity
    settings: GatewaySettings


class RunHandler:
    def __init__(self, gateway: Gateway, queue: BatchQueue, clock: Clock) -> None:
        self._gateway = gateway
        self._queue = queue
        self._clock = clock

    @staticmethod
    def handles_path(path: str) -> bool:
        return _PATH.fullmatch(path) is not None

    async def admit(self, head: InboundRequest) -> BodyHandler | GatewayReply:
        """Check a request by its path and headers, before its body is read.

        Return the function that answers the request, or an error reply. `head` is the request without its body.
        """
        try:
            if head.method != "POST":
                raise MethodNotAllowed(f"/ai/run must be called with POST, not {head.method[:20]}", allowed="POST")
            match = _PATH.fullmatch(head.path)
            if match is None:
                raise NotFound(
                    f"the path {head.path[:200]!r} does not exist", hint="use /accounts/ACCOUNT/ai/run/MODEL"
                )
            account, path_model = match["account"], unquote(match["model"] or "")
            gateway = RequestOptions.from_headers(head.headers).gateway_id or DEFAULT_NAME
            target = RequestTarget("plain", account, gateway)
            caller = _RunCaller(account, gateway, path_model, *await self._gateway.authenticate(target, head.headers))
        except EmberlineError as e:
            return _error_envelope(e)
        return partial(self._answer_admitted, head, caller)

    async def _answer_admitted(self, head: InboundRequest, caller: _RunCaller, body: bytes) -> GatewayReply:
        """Answer a request. Errors are sent in the envelope of Workers AI."""
        inbound = msgspec.structs.replace(head, body=body)
        try:
            run = await _parse_inbound(inbound, caller)
            if run.request_id is not None:
                found = await self._queue.read_result(run.account, run.request_id, run.identity)
                body = await self._queue.encode(run.account, run.identity, build_success_envelope(found))
                return GatewayReply(200, {**JSON_HEADERS}, body, ended="complete")
            if run.queued:
                return _json_reply(build_success_envelope(await self._add_batch(run, inbound)))
            return await self._run_now(run, inbound)
        except EmberlineError as e:
            return _error_envelope(e)

    async def _add_batch(self, run: _RunRequest, inbound: InboundRequest) -> Json:
        caller, (provider, model) = run.identity, resolve_model(run.model, run.settings)
        if not caller.may_use_gateway(run.account, run.gateway) or not caller.may_use_model(provider, model):
            message = f"key {caller.name!r} may not use model {provider}/{model} on gateway {run.account}/{run.gateway}"
            raise Forbidden(message[:300], hint="add the model and the gateway to the key, or use another key")
        if len(inbound.body) > MAX_BATCH_BYTES:
            raise InvalidRequest(
                f"the body of a batch must have at most {MAX_BATCH_BYTES} bytes, not {len(inbound.body)}",
                param="requests",
                hint="split the batch",
            )
        requests = await offload.run_inline_if_small(len(inbound.body), read_batch, inbound.body, run.path_model)
        headers = select_option_headers(inbound.headers)
        return (await self._queue.add(run.account, run.gateway, run.model, caller.key_id, requests, headers)).summary

    async def _run_now(self, run: _RunRequest, inbound: InboundRequest) -> GatewayReply:
        provider, model = resolve_model(run.model, run.settings)
        headers = {**inbound.headers, "cf-aig-gateway-id": run.gateway}
        if run.rejects_if_busy:
            headers["cf-aig-max-attempts"] = "1"
        if provider == _NATIVE:
            path = f"/v1/{run.account}/{run.gateway}/{provider}/{model}"
            query = inbound.query
            if run.rejects_if_busy and "rejectIfBusy=" not in query:
                query = f"{query}&rejectIfBusy=true".lstrip("&")
            body = await offload.run_inline_if_small(len(inbound.body), encode_run_input, inbound.body, run.path_model)
            return await self._gateway.answer(InboundRequest("POST", path, query, headers, body))
        encoded = await offload.run_inline_if_small(len(inbound.body), read_run_request, inbound.body, run.path_model)
        path = f"/accounts/{run.account}/ai{encoded.path}"
        request = InboundRequest("POST", path, "", headers, encoded.body)
        until = self._clock.now() + run.settings.timeouts.total
        retries = 0
        while True:
            reply = await self._gateway.answer(request)
            delay = RETRY_DELAYS_S[min(retries, len(RETRY_DELAYS_S) - 1)]
            if not is_provider_busy(reply) or run.rejects_if_busy or self._clock.now() + delay >= until:
                return await _convert_or_close(encoded, reply)
            await reply.close()
            await asyncio.sleep(delay)
            retries += 1


async def _parse_inbound(inbound: InboundRequest, caller: _RunCaller) -> _RunRequest:
    account, gateway, path_model, identity, settings = caller
    outline = await offload.run_inline_if_small(len(inbound.body), read_outline, inbound.body, path_model)
    queued, rejects = _read_flags(outline.options, inbound.query)
    model = outline.model, path_model, outline.request_id
    return _RunRequest(account, gateway, *model, queued, rejects, identity, settings)


def _error_envelope(error: EmberlineError) -> GatewayReply:
    """Return the error reply in the envelope of Workers AI."""
    reply = error_reply("raw", error)
    reply.headers["content-type"] = "application/json"
    code = {404: 7002, 400: 5006, 401: 10000, 403: 10000, 429: 2003}.get(reply.status, 3043)
    reply.body = sse.dumps(build_failure_envelope(code, str(error)))
    return reply


def _decode_run_body(body: bytes, path_model: str) -> tuple[str, Json, Json]:
    """Return the model, its input and its options.

    `path_model` is the model in the path, or "" if the path names none.
    """
    try:
        decoded = msgspec.json.decode(body, type=dict)
    except JSON_DECODE_ERRORS as e:
        raise InvalidRequest(
            f"the body must be a JSON object: {e}", hint='send an object such as {"prompt": "..."}'
        ) from e
    return (path_model, decoded, {}) if path_model else _read_model_and_input(decoded)


# Each of these functions decodes the body again, so that only its result is copied from the other process.


def read_outline(body: bytes, path_model: str) -> RunOutline:
    model, input, options = _decode_run_body(body, path_model)
    id = str(input["request_id"])[:MAX_BATCH_ID_CHARS] if "request_id" in input else None
    return RunOutline(model, id, {name: value if isinstance(value, bool) else None for name, value in options.items()})


def read_run_request(body: bytes, path_model: str) -> EncodedRequest:
    model, input, _ = _decode_run_body(body, path_model)
    return encode_request(model, input)


def encode_run_input(body: bytes, path_model: str) -> bytes:
    return msgspec.json.encode(_decode_run_body(body, path_model)[1])


def read_batch(body: bytes, path_model: str) -> PackedRequests:
    model, input, _ = _decode_run_body(body, path_model)
    if unknown := input.keys() - {"requests"}:
        name = min(unknown)[:80]
        raise InvalidRequest(
            f"unknown field {name!r} in a batch", param=name, hint="a batch has only the field requests"
        )
    return check_requests(model, input.get("requests"))


_FLAGS = ("queueRequest", "rejectIfBusy")


def _read_model_and_input(body: Json) -> tuple[str, Json, Json]:
    """Return the model, its input and its options from a body with these three fields."""
    model, input, options = body.get("model"), body.get("input") or Json(), body.get("options") or Json()
    if not (model and isinstance(model, str) and isinstance(input, dict) and isinstance(options, dict)):
        raise InvalidRequest(
            "the body must contain model (a string) and input (an object)",
            param="model",
            hint="set model and input, or name the model in the path: /ai/run/MODEL",
        )
    if unknown := (body.keys() - {"model", "input", "options"}) | (options.keys() - {*_FLAGS}):
        name = min(unknown)[:80]
        raise InvalidRequest(
            f"unknown field {name!r} in the body",
            param=name,
            hint="known fields: model, input, options.queueRequest, options.rejectIfBusy",
        )
    return model, input, options


def _read_flags(options: Json, query: str) -> list[bool]:
    """Return the flags queueRequest and rejectIfBusy, which the body's options or the query may set."""
    parameters = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
    for name in _FLAGS:
        if options.get(name, False) not in (True, False) or parameters.get(name, "false") not in ("true", "false"):
            raise InvalidRequest(f"{name} must be true or false", param=name)
    return [options.get(name) is True or parameters.get(name) == "true" for name in _FLAGS]


async def _convert_or_close(request: EncodedRequest, reply: GatewayReply) -> GatewayReply:
    """Convert the reply to the form of Workers AI. If the conversion fails, close the reply and raise."""
    try:
        return await to_run_reply(request, reply)
    except BaseException:
        await reply.close()
        raise


def _json_reply(envelope: Json) -> GatewayReply:
    return GatewayReply(200, {**JSON_HEADERS}, sse.dumps(envelope), ended="complete")
