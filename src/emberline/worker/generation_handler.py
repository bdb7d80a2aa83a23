"""GenerationHandler: replies to the generation requests of all API protocols, with a stream or one JSON body."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from emberline.api.call import ChatCall, CompletionCall
from emberline.api.fields import IGNORED_FIELDS_HEADER
from emberline.api.responses.request import ResponsesCall as ResponsesCall
from emberline.core.errors import EmberlineError, EngineFailed, EngineUnavailable, Overloaded, ShuttingDown
from emberline.core.offload import LARGE_INPUT_BYTES, offload
from emberline.server.exchange import Exchange
from emberline.wire.deltas import ReplyWriter, StreamEnd, StreamStart
from emberline.worker.catalog import LoadedModel, ModelCatalog
from emberline.worker.generation import DeltaGroup
from emberline.worker.protocols import PROTOCOLS, parse_large_body
from emberline.worker.request_context import CHAIN_HEADER, RequestContext
from emberline.worker.server_timing import build_server_timing_header
from emberline.worker.stored_responses import RESPONSES_PATH as RESPONSES
from emberline.worker.stored_responses import ResponseSaver, StoredResponses

log = logging.getLogger("emberline.server")

LAST_EVENT_TIMEOUT_S = 2.0

MAX_IGNORED_HEADER_BYTES = 2048
# Errors that the request did not cause: a tracked stream breaks off, and the router continues it at another worker.
RETRY_ELSEWHERE_ERRORS = (EngineFailed, EngineUnavailable, Overloaded)


class GenerationHandler:
    def __init__(self, catalog: ModelCatalog, responses: StoredResponses) -> None:
        self._catalog = catalog
        self._responses = responses

    async def parse(
        self, path: str, body: bytes, context: RequestContext
    ) -> tuple[ChatCall | CompletionCall, LoadedModel]:
        """Return the parsed body and its model.

        Parameters that the body does not set get the model's sampling defaults and the router's seed. The tenant is
        added to the cache salt. Raises InvalidRequest or ModelNotFound.
        """
        if len(body) < LARGE_INPUT_BYTES:
            call = PROTOCOLS[path].parse(body)
        else:
            contexts = {model.name: model.generator.prompt_builder.max_context for model in self._catalog}
            call = await offload.run(len(body), parse_large_body, path, body, contexts)
        model = self._catalog.select(call.common.model or None)
        defaults: dict[str, Any] = {
            name: value for name, value in model.sampling_defaults.items() if name in call.unset_params
        }
        if call.params.seed is None and context.seed is not None:
            defaults["seed"] = context.seed
        salt = f"{context.tenant} {call.common.cache_salt}" if context.tenant else call.common.cache_salt
        caller = replace(call.common, model=model.name, cache_salt=salt)
        return replace(call, common=caller, params=replace(call.params, **defaults)), model

    async def handle(self, exchange: Exchange, path: str, body: bytes, context: RequestContext) -> None:
        saver = None
        if path == RESPONSES:
            body, saver = await self._responses.expand_request(body, context.tenant)
        call, model = await self.parse(path, body, context)
        protocol = PROTOCOLS[path]
        if isinstance(call, ResponsesCall):
            call = replace(call, is_stored=saver is not None)
            if call.store and saver is None:
                call = replace(call, ignored_fields=[*call.ignored_fields, "store"])
        if call.common.request_id is not None:
            context = replace(context, id=call.common.request_id)
        ignored = [*call.ignored_fields, *model.generator.find_ignored_fields(call)]
        headers = {IGNORED_FIELDS_HEADER: ", ".join(ignored)[:MAX_IGNORED_HEADER_BYTES]} if ignored else {}
        writer = protocol.make_writer(call, protocol.id_prefix + context.id, context.created, model.fingerprint)
        groups = model.generator.generate(call, context)
        exchange.log_fields |= {
            "user": call.common.user,
            "metadata": getattr(call, "metadata", None),
            "stream": call.stream,
        }
        work = (
            _send_stream(exchange, writer, groups, headers, saver, context.is_tracked)
            if call.stream
            else _send_json_body(exchange, writer, groups, headers, saver)
        )
        await exchange.run_while_connected(work)


async def _send_json_body(
    exchange: Exchange,
    writer: ReplyWriter,
    groups: AsyncGenerator[DeltaGroup, None],
    headers: dict[str, str],
    saver: ResponseSaver | None,
) -> None:
    writer.write(StreamStart())
    async with aclosing(groups):
        async for group in groups:
            for delta in group.deltas:
                writer.write(delta)
            if group.chain:
                headers[CHAIN_HEADER] = group.chain
            if group.output is not None and group.output.timing is not None:
                headers = build_server_timing_header(group.output.timing) | headers  # the first timing is kept
    body = writer.body()
    if saver is not None:
        await saver.save(body)
    await exchange.reply_json(body, headers=headers)


async def _send_stream(
    exchange: Exchange,
    writer: ReplyWriter,
    groups: AsyncGenerator[DeltaGroup, None],
    headers: dict[str, str],
    saver: ResponseSaver | None,
    is_tracked: bool,
) -> None:
    """Send the reply as a stream of events, with one write for each group of deltas.

    The status is sent with the first group. So an error before the first group gets an error status. Replayed groups,
    which the client already has, are passed to the writer to restore its state, but are not sent.
    """
    async with aclosing(groups):
        try:
            unsent = [writer.write(StreamStart())]
            async for group in groups:
                unsent += [writer.write(delta) for delta in group.deltas]
                if group.output is None and not group.is_replayed:
                    continue  # the final usage is sent together with the end of the stream
                if not group.is_replayed:
                    if exchange.status is None:
                        await exchange.start_event_stream(
                            headers | (build_server_timing_header(group.output.timing) if group.output else {})
                        )
                    await exchange.send(
                        b"".join([*_build_router_comments(group, unsent), *unsent] if is_tracked else unsent)
                    )
                unsent = []
            unsent.append(writer.write(StreamEnd()))
            if saver is not None:
                await saver.save(writer.body())  # before the client knows that the response has ended
        except asyncio.CancelledError:
            # A tracked stream continues at another worker.
            if exchange.status is not None and not exchange.client_disconnected and not is_tracked:
                await _end_stream_at_shutdown(exchange, writer)
            raise
        except Exception as e:
            if exchange.status is None or (is_tracked and isinstance(e, RETRY_ELSEWHERE_ERRORS)):
                raise
            if not isinstance(e, EmberlineError):
                log.exception("Stream failed: path=%s", exchange.path)
            exchange.log_fields["error"] = e.code if isinstance(e, EmberlineError) else EmberlineError.code
            unsent = [writer.write_error(e)]
    if exchange.status is None:
        await exchange.start_event_stream(headers)
    await exchange.send(
        b"".join([*_build_router_comments(DeltaGroup([]), unsent), *unsent] if is_tracked else unsent), last=True
    )


async def _end_stream_at_shutdown(exchange: Exchange, writer: ReplyWriter) -> None:
    """Send the API protocol's error event as the end of a stream, because the server stops."""
    error = ShuttingDown()
    exchange.log_fields["error"], exchange.logged_status = error.code, error.status
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_EVENT_TIMEOUT_S):  # the client may have stopped reading
            await exchange.send(writer.write_error(error), last=True)


def _build_router_comments(group: DeltaGroup, events: list[bytes]) -> list[bytes]:
    line = group.token_group.to_comment(sum(map(len, events)))
    counts = [b": cached %d\n\n" % group.cached_tokens] if group.cached_tokens is not None else []
    if group.drafts is not None:
        counts.append(b": drafts %d %d\n\n" % group.drafts)
    return [*counts, b": chain %s\n\n" % group.chain.encode(), line] if group.chain else [*counts, line]
