"""Calls: a body in one of the protocols in, its reply out, whole or as it grows."""

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

# What is not the request's own doing: a router that follows its stream sees it break off, and has it go on elsewhere.
MAX_HEADER_BYTES = 2048
ELSEWHERE = (EngineFailed, EngineUnavailable, Overloaded)


class Calls:
    def __init__(self, catalog: Catalog, responses: StoredResponses) -> None:
        self._catalog = catalog
        self._responses = responses

    async def read(self, path: str, body: bytes, journey: Journey) -> tuple[ChatCall | CompletionCall, Served]:
        """The call, and who is asked."""
        if len(body) < LARGE:
            call = PROTOCOLS[path].parse(body)
        else:
            contexts = {model.name: model.generator.prompts.max_context for model in self._catalog}
            call = await offload.run(len(body), parse_large, path, body, contexts)
        model = self._catalog.chosen(call.caller.model or None)
        given: dict[str, Any] = {name: value for name, value in model.defaults.items() if name in call.unset}
        if call.params.seed is None and journey.seed is not None:
            given["seed"] = journey.seed
        salt = f"{journey.tenant} {call.caller.salt}" if journey.tenant else call.caller.salt
        caller = replace(call.caller, model=model.name, salt=salt)
        return replace(call, caller=caller, params=replace(call.params, **given)), model

    async def answer(self, x: Exchange, path: str, body: bytes, journey: Journey) -> None:
        memory = None
        if path == RESPONSES:
            body, memory = await self._responses.completed(body, journey.tenant)
        call, model = await self.read(path, body, journey)
        protocol = PROTOCOLS[path]
        if isinstance(call, ResponsesCall):
            call = replace(call, kept=memory is not None)
            if call.store and memory is None:
                call = replace(call, ignored=[*call.ignored, "store"])
        if call.caller.request_id is not None:
            journey = replace(journey, id=call.caller.request_id)
        ignored = [*call.ignored, *model.generator.ignored(call)]
        headers = {IGNORED: ", ".join(ignored)[:MAX_HEADER_BYTES]} if ignored else {}
        reply = protocol.renderer(call, protocol.prefix + journey.id, journey.created, model.fingerprint)
        groups = model.generator.run(call, journey)
        x.note |= {"user": call.caller.user, "metadata": getattr(call, "metadata", None), "stream": call.stream}
        work = (
            _stream(x, reply, groups, headers, memory, journey.tracked)
            if call.stream
            else _fold(x, reply, groups, headers, memory)
        )
        await x.while_connected(work)


async def _fold(
    x: Exchange, reply: Renderer, groups: AsyncGenerator[Group, None], headers: dict[str, str], memory: Memory | None
) -> None:
    async with aclosing(groups):
        async for group in groups:
            for delta in group.deltas:
                reply.push(delta)
            if group.chain:
                headers[CHAIN] = group.chain
            if group.output is not None and group.output.timing is not None:
                headers = server_timing(group.output.timing) | headers  # the first that is known
    body = reply.body()
    if memory is not None:
        await memory.keep(body)
    await x.json(body, headers=headers)


async def _stream(
    x: Exchange,
    reply: Renderer,
    groups: AsyncGenerator[Group, None],
    headers: dict[str, str],
    memory: Memory | None,
    tracked: bool,
) -> None:
    """The status goes out with the first group: until then an error can still have one of its own. Each group is one
    write. What the client was told elsewhere is rendered like all else, and not sent."""
    async with aclosing(groups):
        try:
            unsent = reply.start()
            async for group in groups:
                unsent += [event for delta in group.deltas for event in reply.push(delta)]
                if group.output is None and not group.told:
                    continue  # the ending, all in one
                if not group.told:
                    if x.status is None:
                        await x.start_events(headers | (server_timing(group.output.timing) if group.output else {}))
                    await x.send(b"".join([*_comments(group, unsent), *unsent] if tracked else unsent))
                unsent = []
            unsent += reply.end()
            if memory is not None:
                await memory.keep(reply.body())  # before its client can ask for it
        except asyncio.CancelledError:
            if x.status is not None and not x.has_left and not tracked:  # a tracked stream goes on at another worker
                await _shut_down(x, reply)
            raise
        except Exception as e:
            if x.status is None or (tracked and isinstance(e, ELSEWHERE)):
                raise
            if not isinstance(e, EmberlineError):
                log.exception("a stream broke")
            x.note["error"] = e.code if isinstance(e, EmberlineError) else EmberlineError.code
            unsent = reply.fail(e)
    if x.status is None:
        await x.start_events(headers)
    await x.send(b"".join([*_comments(Group([]), unsent), *unsent] if tracked else unsent), last=True)


async def _shut_down(x: Exchange, reply: Renderer) -> None:
    """End a stream that is open when the server stops with the protocol's error event."""
    error = ShuttingDown()
    x.note["error"], x.outcome = error.code, error.status
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_EVENT_TIMEOUT_S):  # the client may have stopped reading
            await x.send(b"".join(reply.fail(error)), last=True)


def _comments(group: Group, events: list[bytes]) -> list[bytes]:
    line = group.said.line(sum(map(len, events)))
    news = [b": cached %d\n\n" % group.cached] if group.cached is not None else []
    return [*news, b": chain %s\n\n" % group.chain.encode(), line] if group.chain else [*news, line]
