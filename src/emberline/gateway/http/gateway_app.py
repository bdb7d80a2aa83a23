"""GatewayApp: the gateway's ASGI application.

It serves requests to models, the management API, the dashboard, health checks and metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from emberline.api.openai import models
from emberline.core.errors import EmberlineError, ModelNotFound, ShuttingDown, Unauthorized
from emberline.core.gateway_config import GatewayConfig
from emberline.gateway.admin.admin import AdminAPI
from emberline.gateway.admin.sign_in import SIGN_IN_PATH, SignIn, check_sign_in_connection
from emberline.gateway.core.paths import DEFAULT_NAME, accepts_any_content_type, parse_models_path
from emberline.gateway.core.request import GatewayReply
from emberline.gateway.dialects.gemini import models as gemini_models
from emberline.gateway.error_replies import error_event, error_reply
from emberline.gateway.gateway import KEY_HEADERS, Gateway, InboundRequest, headers_with_query_key
from emberline.gateway.http.client_watch import ClientWatch
from emberline.gateway.http.gateway_metrics import GatewayMetrics, RejectionCounter
from emberline.gateway.http.gateway_socket import GatewaySocket, read_handshake
from emberline.gateway.logs.log_writer import LogWriter
from emberline.gateway.model_lister import ModelLister
from emberline.gateway.run.run_handler import RunHandler
from emberline.gateway.store.base import GatewayStore
from emberline.net.request_response_cycle import ReplyInterrupted
from emberline.server.exchange import ClientDisconnected, Exchange, Receive, Scope, Send
from emberline.server.media_type import is_json, require_json
from emberline.server.metrics import ReplyCounter, listener_families, render_exposition
from emberline.server.pages import StaticPage as File
from emberline.server.rejections import RejectionLog, WrongKeyDelay
from emberline.wire.errors import render_openai_error

log = logging.getLogger("emberline.gateway")

EXPORT_SEND_TIMEOUT_S = 60.0  # for the client to read one chunk of an export
ERROR_SEND_TIMEOUT_S = 2.0  # after a request's deadline, for the client to read the error event
SEND_CHUNK_BYTES = 1 << 18
DEFAULT_CONTENT_TYPE = "application/octet-stream"
MAX_ADMIN_BODY_BYTES = 4 << 20
MAX_SIGN_IN_BODY_BYTES = 1024
# The dashboard has an admin key: no site may frame it, and no data that it shows may become a script.
PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

PageHandler = Callable[[Exchange], Awaitable[None]]


class GatewayApp:
    def __init__(
        self,
        config: GatewayConfig,
        gateway: Gateway,
        run_handler: RunHandler,
        admin: AdminAPI,
        sign_in: SignIn,
        models: ModelLister,
        store: GatewayStore,
        metrics: GatewayMetrics,
        files: dict[str, File],
        log_writer: LogWriter,
        require_keys: bool = False,
    ) -> None:
        """Create the application. If `require_keys` is true, /metrics also requires a key."""
        self._log_writer = log_writer
        self._config = config
        self._gateway = gateway
        self._run_handler = run_handler
        self._admin = admin
        self.sign_in = sign_in
        self._models = models
        self.store = store
        self._metrics = metrics
        self._files = files
        self._require_keys = require_keys or bool(config.api_keys)
        self._replies = ReplyCounter()
        self._rejections, self._wrong_keys = RejectionLog(log), WrongKeyDelay()
        self._rejection_counter = RejectionCounter()
        self._ready_at = time.monotonic()  # the wall clock may be set
        self._pages: dict[str, PageHandler] = {
            **dict.fromkeys(files, self._send_file),
            "/health": self._send_liveness,
            "/health/live": self._send_liveness,
            "/health/ready": self._send_readiness,
            "/metrics": self._send_metrics,
            "/v1/models": self._list_models,
        }

    async def has_valid_key(self, scope: Scope) -> bool:
        """Return whether a request has a valid gateway key."""
        headers = (
            read_handshake(scope).headers if scope["type"] == "websocket" else _decode_headers(dict(scope["headers"]))
        )
        try:
            return (await self._gateway.identify(headers)).kind != "anonymous"
        except EmberlineError:
            return False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            handshake = Exchange({"method": "GET", **scope}, receive, send)
            await GatewaySocket(self._gateway, scope, receive, send, partial(self._reject, handshake)).run()
            return
        assert scope["type"] == "http"
        exchange = Exchange(scope, receive, send)
        path = scope.get("raw_path", b"").decode("latin-1") or exchange.path
        page = self._find_page_handler(exchange, path)
        try:
            if page is not None:
                await page(exchange)
            else:
                await self._answer_request(exchange, path, receive)
        except ClientDisconnected:
            exchange.log_fields["client"] = "gone"
        except Exception as e:
            if not isinstance(e, EmberlineError | ReplyInterrupted):
                log.exception(
                    "Request failed with an internal error: method=%s path=%s", exchange.method, exchange.path
                )
            if exchange.status is not None:
                raise ReplyInterrupted from None  # the server closes the connection: the reply must not look complete
            reply = render_openai_error(e)
            if isinstance(e, EmberlineError):
                await self._reject(exchange, e)
            await exchange.reply_json(reply.body, reply.status, reply.headers)
        self._replies.count(exchange.path if exchange.path in self._pages else "other", exchange.status or 499)

    def _find_page_handler(self, exchange: Exchange, path: str) -> PageHandler | None:
        """Return the handler of a page, health check or management path, or None for a request to a model."""
        if exchange.method in ("GET", "HEAD"):
            if (page := self._pages.get(exchange.path)) is not None:
                return page
            if parse_models_path(exchange.path) is not None:
                return self._list_models
        if exchange.path == SIGN_IN_PATH and exchange.method == "POST":
            return self._exchange_sign_in_token
        if AdminAPI.handles_path(path):
            return self._answer_admin_request
        return None

    async def _answer_request(self, exchange: Exchange, path: str, receive: Receive) -> None:
        head = InboundRequest(exchange.method, path, exchange.query, _request_headers(exchange), b"")
        handler = self._run_handler if RunHandler.handles_path(path) else self._gateway
        answer = await handler.admit(head)  # without a valid key, no byte of the body is read
        if isinstance(answer, GatewayReply):
            await self._send_error(exchange, answer)
            return
        body = await exchange.read_body(self._config.max_body)
        _check_content_type(exchange, path, body)
        try:
            with ClientWatch(receive) as watch:
                reply = await answer(body)
                if reply.status >= 400:
                    body = b""  # it must not be kept during a delay
                    await self._record_rejection(exchange, reply.status, reply.error, reply.error_message)
                watch.set_timeout(max(reply.send_timeout_s, 0.0) + ERROR_SEND_TIMEOUT_S)
                await self._send_and_close(exchange, reply, watch)
        except TimeoutError:
            log.warning("Reply cut off because the client did not read in time: path=%s", exchange.path)
            raise ReplyInterrupted from None

    async def _send_error(self, exchange: Exchange, reply: GatewayReply) -> None:
        """Reply to a request whose body was not read."""
        assert isinstance(reply.body, bytes)
        headers = dict(reply.headers)
        try:
            await self._record_rejection(exchange, reply.status, reply.error, reply.error_message)
            await exchange.reply(reply.status, reply.body, headers.pop("content-type", DEFAULT_CONTENT_TYPE), headers)
        finally:
            await reply.close()

    async def _reject(self, exchange: Exchange, error: EmberlineError) -> None:
        await self._record_rejection(exchange, error.status, error.code, str(error))

    async def _record_rejection(self, exchange: Exchange, status: int, code: str, message: str) -> None:
        """Log and count a rejected request. Wait before the reply to a wrong key."""
        if code == Unauthorized.code and any(exchange.header(name) for name in KEY_HEADERS):
            await self._wrong_keys.wait()
        self._rejection_counter.count(status, code)
        self._rejections.record(exchange, status, code, message)

    async def _send_and_close(self, exchange: Exchange, reply: GatewayReply, watch: ClientWatch) -> None:
        try:
            await self._send_reply(exchange, reply, watch)
        except asyncio.CancelledError:
            reply.ended = reply.ended if not isinstance(reply.body, bytes) else "left"  # a stream sets it by itself
            if exchange.status is not None and not isinstance(reply.body, bytes) and not watch.has_ended:
                await _send_shutdown_error(exchange, reply)
            raise
        finally:
            watch.finish()
            await reply.close()

    async def _send_reply(self, exchange: Exchange, reply: GatewayReply, watch: ClientWatch) -> None:
        headers = dict(reply.headers)  # a copy: close callbacks read the reply's own headers
        content_type = headers.pop("content-type", DEFAULT_CONTENT_TYPE)
        if isinstance(reply.body, bytes) and len(reply.body) <= SEND_CHUNK_BYTES:
            watch.stop_watching()
            await exchange.reply(reply.status, reply.body, content_type, headers)
            return
        if isinstance(reply.body, bytes):
            await self._send_in_chunks(exchange, reply, content_type, headers)
            return
        await exchange.start_reply(
            reply.status, content_type, {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        )
        async for chunk in reply.body:
            await exchange.send(chunk)
        watch.stop_watching()
        await exchange.send(last=True)

    async def _send_in_chunks(
        self, exchange: Exchange, reply: GatewayReply, content_type: str, headers: dict[str, str]
    ) -> None:
        """Send a large reply in chunks, as fast as the client reads them.

        The server would otherwise buffer the whole reply.
        """
        assert isinstance(reply.body, bytes)
        await exchange.start_reply(reply.status, content_type, headers, len(reply.body))
        for at in range(0, len(reply.body), SEND_CHUNK_BYTES):
            await exchange.send(reply.body[at : at + SEND_CHUNK_BYTES], last=at + SEND_CHUNK_BYTES >= len(reply.body))

    # -- management ----------------------------------------------------------------------------------------------------

    async def _answer_admin_request(self, exchange: Exchange) -> None:
        identity = await self._gateway.identify(_request_headers(exchange))
        if self._admin.is_export(exchange.method, exchange.path):
            await exchange.run_while_connected(
                _send_export(exchange, self._admin.export(exchange.method, exchange.path, exchange.query, identity))
            )
            return
        if (rejection := self._admin.find_rejection(exchange.method, exchange.path, identity)) is not None:
            status, error = rejection
            await self._record_rejection(exchange, status, *_admin_error(status, error))
            await exchange.reply_json(error, status, {"cache-control": "no-store"})
            return
        body = await exchange.read_body(min(self._config.max_body, MAX_ADMIN_BODY_BYTES))
        if body:
            require_json(exchange.header("content-type"))
        status, found = await self._admin.handle(
            exchange.method, exchange.path, exchange.query, body, identity, _client_origin(exchange)
        )
        if status >= 400:
            await self._record_rejection(exchange, status, *_admin_error(status, found))
        await exchange.reply_json(found, status, {"cache-control": "no-store"})

    async def _exchange_sign_in_token(self, exchange: Exchange) -> None:
        check_sign_in_connection(exchange.scheme, exchange.client, _request_headers(exchange))
        require_json(exchange.header("content-type"))
        body = await exchange.read_body(MAX_SIGN_IN_BODY_BYTES)
        key = await self.sign_in.exchange_token(body)
        reply = {"id": key.id, "key": key.secret, "account": DEFAULT_NAME, "expires": key.expires}
        await exchange.reply_json(reply, headers={"cache-control": "no-store"})

    async def _list_models(self, exchange: Exchange) -> None:
        parsed = parse_models_path(exchange.path)
        assert parsed is not None
        target, name = parsed
        headers = headers_with_query_key(_request_headers(exchange), exchange.query)
        identity, settings = await self._gateway.authenticate(target, headers)
        found = await self._models.list_models(settings, identity, with_provider=target.kind == "compat")
        if not _is_gemini_client(exchange, headers):
            await exchange.reply_json(models.retrieve_model(found, name) if name else models.list_models(found))
        elif name and name not in {each.id for each in found}:
            reply = error_reply(
                "gemini", ModelNotFound(f"model {name[:200]!r} not found", hint="GET /v1beta/models lists the models")
            )
            assert isinstance(reply.body, bytes)
            await exchange.reply(reply.status, reply.body, reply.headers["content-type"])
        else:
            await exchange.reply_json(gemini_models.render(found, name))

    # -- pages, health and metrics -------------------------------------------------------------------------------------

    async def _send_file(self, exchange: Exchange) -> None:
        file = self._files[exchange.path]
        await exchange.reply(200, file.body, file.content_type, PAGE_HEADERS)

    async def _send_liveness(self, exchange: Exchange) -> None:
        await exchange.reply_json({"status": "live", "uptime_seconds": int(time.monotonic() - self._ready_at)})

    async def _send_readiness(self, exchange: Exchange) -> None:
        await self.store.version()
        self._log_writer.check_store()  # a full store can still be read
        await exchange.reply_json({"status": "ready"})

    async def _send_metrics(self, exchange: Exchange) -> None:
        if self._require_keys and (await self._gateway.identify(_request_headers(exchange))).kind != "token":
            raise Unauthorized(
                "/metrics requires a gateway key and the request has none", hint="send Authorization: Bearer KEY"
            )
        counters = self._replies, self._wrong_keys, self._rejection_counter
        families = (*self._metrics.families(), *(counter.family() for counter in counters), *listener_families())
        text = render_exposition(families)
        await exchange.reply(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")


async def _send_export(exchange: Exchange, lines: AsyncIterator[bytes]) -> None:
    await exchange.start_reply(200, "application/x-ndjson", {"cache-control": "no-cache"})
    try:
        async for line in lines:
            async with asyncio.timeout(EXPORT_SEND_TIMEOUT_S):
                await exchange.send(line)
    except TimeoutError:
        raise ReplyInterrupted from None
    await exchange.send(last=True)


def _check_content_type(exchange: Exchange, path: str, body: bytes) -> None:
    """Raise UnsupportedMediaType if the body is JSON but the content type is not a JSON type.

    The paths of a provider's own API also accept forms and binary data.
    """
    if not body or exchange.headers.get(b"content-type") == b"application/json":  # the usual case
        return
    if is_json(kind := exchange.header("content-type")):
        return
    if RunHandler.handles_path(path) and kind.startswith("text/plain") and exchange.header("authorization"):
        return  # JavaScript's fetch() sends strings so; another site cannot add `authorization` without CORS
    if not accepts_any_content_type(path) or body.lstrip()[:1] in (b"{", b"["):
        require_json(kind)


def _admin_error(status: int, reply: Any) -> tuple[str, str]:
    """Return code and message of an error reply of the management API, in its own or in Cloudflare's form."""
    error = reply["error"] if "error" in reply else reply["errors"][0]
    return Unauthorized.code if status == Unauthorized.status else str(error["code"]), str(error["message"])


def _client_origin(exchange: Exchange) -> str:
    """Return the scheme and host that the client used: those of the gateway, or of a proxy in front of it."""
    scheme = "https" if exchange.header("x-forwarded-proto") == "https" else exchange.scheme
    return f"{scheme}://{exchange.header('host')}"


def _is_gemini_client(exchange: Exchange, headers: Mapping[str, str]) -> bool:
    """Return whether the request lists models with Gemini's protocol, whose path may be the same as OpenAI's."""
    return exchange.path.startswith("/v1beta/") or "x-goog-api-client" in headers or "x-goog-api-key" in headers


def _request_headers(exchange: Exchange) -> dict[str, str]:
    return _decode_headers(exchange.headers)


def _decode_headers(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}


async def _send_shutdown_error(exchange: Exchange, reply: GatewayReply) -> None:
    """End an open stream with the dialect's error event because the gateway is shutting down.

    Log the request as a 503.
    """
    error = ShuttingDown()

    async def set_error(reply: GatewayReply) -> None:
        reply.status, reply.ended, reply.error = error.status, "cut", error.code

    reply.close_callbacks.insert(0, set_error)
    if (event := error_event(reply.dialect, error)) is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ERROR_SEND_TIMEOUT_S):  # the client may have stopped reading
                await exchange.send(event, last=True)
