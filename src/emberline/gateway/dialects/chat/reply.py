"""Converts an unstreamed chat completion to and from the canonical form."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.change_report import ChangeReport
from emberline.gateway.dialects.chat import citations
from emberline.gateway.dialects.chat.content import (
    parse_assistant,
    read_mistral_reasoning,
)
from emberline.gateway.dialects.field_reader import FieldReader, parse_rows
from emberline.wire import deltas
from emberline.wire.chat import ChatWriter
from emberline.wire.finish_reasons import FROM_CHAT
from emberline.wire.reply_context import ReplyContext
from emberline.wire.usage import Usage

_IGNORED_FIELDS = (
    "object",
    "system_fingerprint",
    "service_tier",
    "usage",
    "metadata",
    "index",
    "x_groq",
    "stop_reason",
    "role",
)


def parse(body: canonical.Json, changes: ChangeReport) -> canonical.CanonicalReply:
    fields = FieldReader(body, "")
    id, model, created = fields.read("id", str, ""), fields.read("model", str, ""), fields.read("created", float, 0)
    choices = parse_rows(fields.require("choices", list), "choices", partial(_parse_choice, changes=changes))
    changes.report_reply_fields(fields.unread, _IGNORED_FIELDS)
    return canonical.CanonicalReply("openai-chat", id, model, choices, int(created), Usage.find_in("openai-chat", body))


def _parse_choice(raw: object, path: str, changes: ChangeReport) -> canonical.CanonicalChoice:
    fields = FieldReader(raw, path)
    message = parse_assistant(FieldReader(fields.require("message", dict), f"{path}.message"))
    citations.extract_citations_from_message(message)
    for index, part in enumerate(message.parts):
        if isinstance(part, canonical.OpaqueContent) and (reasoning := read_mistral_reasoning(part.raw)):
            message.parts[index] = canonical.ReasoningContent(reasoning, "openai-chat")
    reason = FROM_CHAT.get(fields.read("finish_reason", str, "stop"), "stop")
    logprobs = fields.read("logprobs", dict)
    tokens = logprobs.get("content") if logprobs else None
    changes.report_reply_fields(message.extra, _IGNORED_FIELDS)
    changes.report_reply_fields(fields.unread, _IGNORED_FIELDS)
    return canonical.CanonicalChoice(
        message.parts, canonical.correct_finish_reason(reason, message.parts), logprobs=tokens
    )


def render(reply: canonical.CanonicalReply, context: ReplyContext) -> canonical.Json:
    writer = ChatWriter(context, stream=False)
    writer.write(deltas.StreamStart(reply.id, reply.model, reply.created))
    for index, choice in enumerate(reply.choices):
        for delta in _iter_choice_deltas(index, choice):
            writer.write(delta)
    if reply.usage is not None:
        writer.write(deltas.UsageUpdate(reply.usage))
    return writer.body()


def _iter_choice_deltas(index: int, choice: canonical.CanonicalChoice) -> Iterator[deltas.Delta]:
    num_characters = 0  # of the parts' joined text, in which citations count
    if choice.logprobs is not None:
        yield deltas.TextDelta("", index, logprobs=choice.logprobs)
    for slot, part in _count_calls_before_parts(choice.parts):
        match part:
            case canonical.TextContent():
                yield deltas.TextDelta(part.text, index)
                for citation in part.citations:
                    yield deltas.CitationDelta(citation.with_offset(num_characters), index)
                num_characters += len(part.text)
            case canonical.ReasoningContent():
                if part.text:
                    yield deltas.ReasoningDelta(part.text, index)
                yield deltas.SignatureDelta(part.signature, part.origin, choice=index)
            case canonical.RefusalContent():
                yield deltas.RefusalDelta(part.text, index)
            case canonical.ToolCallContent():
                yield deltas.ToolCallStart(slot, part.id, part.name, index)
                yield deltas.ToolCallArguments(slot, part.arguments, index)
    yield deltas.Finish(choice.finish_reason or "stop", choice=index)


def _count_calls_before_parts(parts: list[canonical.Part]) -> Iterator[tuple[int, canonical.Part]]:
    """Yield (number of tool calls before the part, part) for each part."""
    num_calls = 0
    for part in parts:
        yield num_calls, part
        num_calls += isinstance(part, canonical.ToolCallContent)
