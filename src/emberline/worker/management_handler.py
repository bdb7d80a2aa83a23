"""ManagementHandler: the endpoints that pull, load, unload and remove models. They need the admin key."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from emberline.api.fields import IGNORED_FIELDS_HEADER
from emberline.api.model_management import SUCCESS, parse_model_request, parse_unload_request
from emberline.api.ollama.reply import STREAM_MEDIA_TYPE
from emberline.core.errors import EmberlineError
from emberline.server.exchange import Exchange
from emberline.server.route_table import Handler, HTTPRoute, select_error_renderer
from emberline.wire.sse import dumps
from emberline.worker.model_manager import ModelManager

log = logging.getLogger("emberline.server")

MAX_BODY_BYTES = 1 << 16
OLLAMA_UNLOAD_TIMEOUT_S = 60.0  # for open requests of a model that /api/delete removes

ProgressLines = AsyncGenerator[dict[str, Any], None]


class ManagementHandler:
    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager

    def routes(self) -> dict[str, HTTPRoute]:
        def admin(handler: Handler, method: str = "POST", *, requires_json: bool = True) -> HTTPRoute:
            return HTTPRoute(handler, method, "admin", requires_json)

        return {
            "/admin/models": admin(self._list, "GET"),
            "/admin/models/pull": admin(self._pull),
            "/admin/models/load": admin(self._load),
            "/admin/models/unload": admin(self._unload),
            "/admin/models/remove": admin(self._remove),
            # Ollama's clients expect that they can use a model that they have pulled.
            "/api/pull": admin(self._load, requires_json=False),
            "/api/delete": admin(self._unload_and_remove, "DELETE"),
        }

    async def _list(self, exchange: Exchange) -> None:
        await exchange.reply_json(await self._manager.describe())

    async def _pull(self, exchange: Exchange) -> None:
        await self._send_progress(exchange, self._manager.pull)

    async def _load(self, exchange: Exchange) -> None:
        await self._send_progress(exchange, self._manager.load)

    async def _unload(self, exchange: Exchange) -> None:
        request, _ = parse_unload_request(await exchange.read_body(MAX_BODY_BYTES))
        await self._manager.unload(request.require_model(), request.timeout_s)
        await exchange.reply_json(SUCCESS)

    async def _remove(self, exchange: Exchange) -> None:
        request, _ = parse_model_request(await exchange.read_body(MAX_BODY_BYTES))
        removed = await self._manager.remove(request.require_model())
        await exchange.reply_json({**SUCCESS, "model": removed.name, "bytes": removed.num_bytes})

    async def _unload_and_remove(self, exchange: Exchange) -> None:
        request, _ = parse_model_request(await exchange.read_body(MAX_BODY_BYTES))
        await self._manager.remove(request.require_model(), unload_timeout_s=OLLAMA_UNLOAD_TIMEOUT_S)
        await exchange.reply_json(SUCCESS)

    async def _send_progress(self, exchange: Exchange, work: Callable[[str], ProgressLines]) -> None:
        request, ignored = parse_model_request(await exchange.read_body(MAX_BODY_BYTES))
        lines = work(request.require_model())
        value = ignored.to_header_value()
        headers = {IGNORED_FIELDS_HEADER: value} if value else {}
        exchange.log_fields["model"] = request.require_model()
        send = _stream_lines if request.stream is not False else _wait_for_end
        await exchange.run_while_connected(send(exchange, lines, headers))


async def _wait_for_end(exchange: Exchange, lines: ProgressLines, headers: dict[str, str]) -> None:
    last: dict[str, Any] = {}
    async with aclosing(lines):
        async for line in lines:
            last = line
    await exchange.reply_json(last, headers=headers)


async def _stream_lines(exchange: Exchange, lines: ProgressLines, headers: dict[str, str]) -> None:
    """Send each line as it comes. After the first, an error is sent as the last line, because the status is sent."""
    async with aclosing(lines):
        try:
            async for line in lines:
                if exchange.status is None:
                    await exchange.start_event_stream(headers, STREAM_MEDIA_TYPE)
                await exchange.send(dumps(line) + b"\n")
        except Exception as error:
            if exchange.status is None:
                raise
            if not isinstance(error, EmberlineError):
                log.exception("Model change failed: path=%s", exchange.path)
            exchange.log_fields["error"] = error.code if isinstance(error, EmberlineError) else EmberlineError.code
            body = select_error_renderer(exchange.protocol_path)(error).body
            await exchange.send(dumps(body) + b"\n", last=True)
            return
    await exchange.send(last=True)
