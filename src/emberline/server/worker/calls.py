"""GenerationHandler: answers the generation requests of all protocols, with a stream or a plain reply."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from emberline.api.call import ChatCall, CompletionCall
from emberline.api.deltas import Renderer
from emberline.api.fields import IGNORED
from emberline.api.responses.request import Call as ResponsesCall
from emberline.core.errors import EmberlineError, EngineFailed, EngineUnavailable, Overloaded, ShuttingDown
from emberline.core.offload import LARGE, offload
from emberline.server.exchange import Exchange
from emberline.server.worker.catalog import Catalog, Served
from emberline.server.worker.groups import Group
from emberline.server.worker.journey import CHAIN, Journey
from emberline.server.worker.protocol import PROTOCOLS, parse_large
from emberline.server.worker.server_timing import server_timing
from emberline.server.worker.stored_responses import PATH as RESPONSES
from emberline.server.worker.stored_responses import Memory, StoredResponses

log = logging.getLogger("emberline.server")

LAST_EVENT_TIMEOUT_S = 2.0

MAX_HEADER_BYTES = 2048
# Errors that the request did not cause: a tracked stream breaks off, and the router continues it at another worker.
ELSEWHERE = (EngineFailed, EngineUnavailable, Overloaded)


class Calls:
    def __init__(self, catalog: Catalog, responses: StoredResponses) -> None:
        self._catalog = catalog
        self._responses = responses

    async def read(self, path: str, body: bytes, journey: Journey) -> tuple[ChatCall | CompletionCall, Served]:
        """Parse a body and select its model; add the model's sampling defaults, the seed and the tenant's cache salt.

        Raises InvalidRequest or ModelNotFound.
        """
        if len(body) < LARGE:
            call = PROTOCOLS[path].parse(body)
        else:
            contexts = {model.name: model.generator.prompts.max_context for model in self._catalog}
            call = await offload.run(len(body), parse_large, path, body, contexts)
        model = self._catalog.chosen(call.caller.model or None)
        defaults: dict[str, Any] = {name: value for name, value in model.defaults.items() if name in call.unset}
        if call.params.seed is None and journey.seed is not None:
            defaults["seed"] = journey.seed
        salt = f"{journey.tenant} {call.caller.salt}" if journey.tenant else call.caller.salt
        caller = replace(call.caller, model=model.name, salt=salt)
        return replace(call, caller=caller, params=replace(call.params, **defaults)), model

    async def answer(self, exchange: Exchange, path: str, body: bytes, journey: Journey) -> None:
        saver = None
        if path == RESPONSES:
            body, saver = await self._responses.completed(body, journey.tenant)
        call, model = await self.read(path, body, journey)
        protocol = PROTOCOLS[path]
        if isinstance(call, ResponsesCall):
            call = replace(call, kept=saver is not None)
            if call.store and saver is None:
                call = replace(call, ignored=[*call.ignored, "store"])
        if call.caller.request_id is not None:
            journey = replace(journey, id=call.caller.request_id)
        ignored = [*call.ignored, *model.generator.ignored(call)]
        headers = {IGNORED: ", ".join(ignored)[:MAX_HEADER_BYTES]} if ignored else {}
        writer = protocol.renderer(call, protocol.prefix + journey.id, journey.created, model.fingerprint)
        groups = model.generator.run(call, journey)
        exchange.note |= {"user": call.caller.user, "metadata": getattr(call, "metadata", None), "stream": call.stream}
        work = (
            _send_stream(exchange, writer, groups, headers, saver, journey.tracked)
            if call.stream
            else _send_plain(exchange, writer, groups, headers, saver)
        )
        await exchange.while_connected(work)


async def _send_plain(
    exchange: Exchange,
    writer: Renderer,
    groups: AsyncGenerator[Group, None],
    headers: dict[str, str],
    saver: Memory | None,
) -> None:
    async with aclosing(groups):
        async for group in groups:
            for delta in group.deltas:
                writer.push(delta)
            if group.chain:
                headers[CHAIN] = group.chain
            if group.output is not None and group.output.timing is not None:
                headers = server_timing(group.output.timing) | headers  # the first timing is kept
    body = writer.body()
    if saver is not None:
        await saver.keep(body)
    await exchange.json(body, headers=headers)


async def _send_stream(
    exchange: Exchange,
    writer: Renderer,
    groups: AsyncGenerator[Group, None],
    headers: dict[str, str],
    saver: Memory | None,
    tracked: bool,
) -> None:
    """Send the reply as a stream, each group in one write.

    The status is sent with the first group, so that an earlier error can have its own. Replayed groups restore the
    writer's state and are not sent.
    """
    async with aclosing(groups):
        try:
            unsent = writer.start()
            async for group in groups:
                unsent += [event for delta in group.deltas for event in writer.push(delta)]
                if group.output is None and not group.told:
                    continue  # the final usage is sent together with the end of the stream
                if not group.told:
                    if exchange.status is None:
                        await exchange.start_events(
                            headers | (server_timing(group.output.timing) if group.output else {})
                        )
                    await exchange.send(b"".join([*_comments(group, unsent), *unsent] if tracked else unsent))
                unsent = []
            unsent += writer.end()
            if saver is not None:
                await saver.keep(writer.body())  # before the client knows that the response has ended
        except asyncio.CancelledError:
            # A tracked stream continues at another worker.
            if exchange.status is not None and not exchange.has_left and not tracked:
                await _end_stream_at_shutdown(exchange, writer)
            raise
        except Exception as e:
            if exchange.status is None or (tracked and isinstance(e, ELSEWHERE)):
                raise
            if not isinstance(e, EmberlineError):
                log.exception("Stream failed: path=%s", exchange.path)
            exchange.note["error"] = e.code if isinstance(e, EmberlineError) else EmberlineError.code
            unsent = writer.fail(e)
    if exchange.status is None:
        await exchange.start_events(headers)
    await exchange.send(b"".join([*_comments(Group([]), unsent), *unsent] if tracked else unsent), last=True)


async def _end_stream_at_shutdown(exchange: Exchange, writer: Renderer) -> None:
    """End an open stream with the protocol's error event when the server stops."""
    error = ShuttingDown()
    exchange.note["error"], exchange.outcome = error.code, error.status
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_EVENT_TIMEOUT_S):  # the client may have stopped reading
            await exchange.send(b"".join(writer.fail(error)), last=True)


def _comments(group: Group, events: list[bytes]) -> list[bytes]:
    line = group.said.line(sum(map(len, events)))
    cached = [b": cached %d\n\n" % group.cached] if group.cached is not None else []
    return [*cached, b": chain %s\n\n" % group.chain.encode(), line] if group.chain else [*cached, line]
