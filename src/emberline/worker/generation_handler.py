"""GenerationHandler: replies to the generation requests of all API protocols, with a stream or one JSON body."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from emberline.api.call import ChatCall, CompletionCall
from emberline.api.responses.request import ResponsesCall as ResponsesCall
from emberline.cluster.resumable_streams import ResumableStreams, digest_request
from emberline.core.offload import LARGE_INPUT_BYTES, offload
from emberline.server.exchange import Exchange
from emberline.wire.deltas import ReplyWriter, StreamStart
from emberline.worker.catalog import LoadedModel, ModelCatalog
from emberline.worker.generation import DeltaGroup
from emberline.worker.ignored_fields import IgnoredFieldPolicy
from emberline.worker.protocols import PROTOCOLS, parse_large_body
from emberline.worker.request_context import CHAIN_HEADER, RequestContext
from emberline.worker.server_timing import build_server_timing_header
from emberline.worker.stored_responses import RESPONSES_PATH as RESPONSES
from emberline.worker.stored_responses import ResponseSaver, StoredResponses
from emberline.worker.stream_sender import StreamSender


class GenerationHandler:
    def __init__(
        self,
        catalog: ModelCatalog,
        responses: StoredResponses,
        resumable_streams: ResumableStreams,
        ignored_fields: IgnoredFieldPolicy,
    ) -> None:
        self._catalog = catalog
        self._ignored_fields = ignored_fields
        self._responses = responses
        self.resumable_streams = resumable_streams

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
        if "max_tokens" in defaults:  # a request may set only a minimum, above the default limit
            defaults["max_tokens"] = max(defaults["max_tokens"], call.params.min_tokens)
        if call.params.seed is None and context.seed is not None:
            defaults["seed"] = context.seed
        salt = f"{context.tenant} {call.common.cache_salt}" if context.tenant else call.common.cache_salt
        caller = replace(call.common, model=model.name, cache_salt=salt, tenant=context.tenant)
        return replace(call, common=caller, params=replace(call.params, **defaults)), model

    async def handle(self, exchange: Exchange, path: str, body: bytes, context: RequestContext) -> None:
        saver, client_body = None, body
        if path == RESPONSES:
            body, saver = await self._responses.expand_request(body, context.tenant)
        call, model = await self.parse(path, body, context)
        protocol = PROTOCOLS[path]
        if isinstance(call, ResponsesCall):
            call = replace(call, is_stored=saver is not None)
            if call.store and saver is None:
                call = replace(call, ignored=call.ignored.with_known(["store"]))
        if call.common.request_id is not None:
            context = replace(context, id=call.common.request_id)
        headers = self._ignored_fields.apply(call.ignored.with_known(model.generator.find_ignored_fields(call)))
        writer = protocol.make_writer(call, protocol.id_prefix + context.id, context.created, model.fingerprint)
        groups = model.generator.generate(call, context)
        exchange.log_fields |= {
            "user": call.common.user,
            "metadata": getattr(call, "metadata", None),
            "stream": call.stream,
        }
        if not call.stream:
            await exchange.run_while_connected(_send_json_body(exchange, writer, groups, headers, saver))
            return
        sender = StreamSender(exchange, writer, saver, context, protocol.stream_media_type)
        if not context.has_event_ids:
            await exchange.run_while_connected(sender.send_all(groups, headers))
            return
        sender.resumable = stream = self.resumable_streams.open(
            context.handoff,
            tenant=context.tenant,
            request_digest=digest_request(path, client_body),
            reply_id=protocol.id_prefix + context.id,
            created=context.created,
            seed=context.seed,
        )
        try:
            await exchange.run_while_connected(sender.send_all(groups, headers))
        finally:
            self.resumable_streams.close(stream, is_resumable=not sender.has_sent_error)


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
