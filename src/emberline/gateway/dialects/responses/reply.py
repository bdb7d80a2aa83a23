"""Converts an unstreamed response to and from the canonical form."""

from __future__ import annotations

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.change_report import ChangeReport
from emberline.gateway.dialects.errors import make_stream_error
from emberline.gateway.dialects.field_reader import FieldReader
from emberline.gateway.dialects.responses import citations
from emberline.gateway.dialects.responses.items import parse_item
from emberline.gateway.dialects.responses.namespaces import render_tool_name
from emberline.wire import signatures
from emberline.wire.citations import render_responses_citation
from emberline.wire.deltas import FinishReason, StreamStart
from emberline.wire.finish_reasons import FROM_RESPONSES, TO_RESPONSES
from emberline.wire.reply_context import ReplyContext
from emberline.wire.usage import Usage
from emberline.wire.usage_objects import render_responses_usage

# Required fields of every reply that repeat the request, for requests without them.
_DEFAULT_ECHO: canonical.Json = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


def parse(body: canonical.Json, changes: ChangeReport) -> canonical.CanonicalReply:
    fields = FieldReader(body, "")
    if fields.unread.get("status") in ("failed", "cancelled"):
        raise make_stream_error(
            {"error": fields.unread.get("error") or {"message": f"the response has status {fields.unread['status']!r}"}}
        )
    id, model = fields.read("id", str, ""), fields.read("model", str, "")
    parts: list[canonical.Part] = []
    logprobs: list[canonical.Json] = []
    for index, raw in enumerate(fields.require("output", list)):
        for part in parse_item(raw, f"output[{index}]").parts:
            if isinstance(part, canonical.TextContent):
                logprobs += part.extra.get("logprobs") or []
            parts.append(part)
    citations.extract_citations_from_parts(parts)
    reason = parse_finish_reason(fields.unread.get("status"), fields.read("incomplete_details", dict))
    choice = canonical.CanonicalChoice(parts, canonical.correct_finish_reason(reason, parts), logprobs=logprobs or None)
    created = int(fields.read("created_at", float, 0))
    return canonical.CanonicalReply(
        "openai-responses", id, model, [choice], created, Usage.find_in("openai-responses", body)
    )


def parse_finish_reason(status: object, details: canonical.Json | None) -> FinishReason:
    return "stop" if status != "incomplete" else FROM_RESPONSES.get(str((details or {}).get("reason")), "length")


def render(reply: canonical.CanonicalReply, context: ReplyContext) -> canonical.Json:
    if not reply.choices:
        raise UpstreamBroken("the provider's reply has no choices")
    context.set_identity(reply)
    choice = reply.choices[0]
    incomplete_reason = TO_RESPONSES[choice.finish_reason or "stop"]
    items = [
        _render_item(part, make_item_id(reply.id, index), choice, context)
        for index, part in enumerate(choice.parts)
        if _is_representable(part)
    ]
    return render_response(reply, context, items, incomplete_reason=incomplete_reason, usage=reply.usage)


def render_response(
    reply: canonical.CanonicalReply | StreamStart,
    context: ReplyContext,
    items: list[canonical.Json],
    *,
    status: str | None = None,
    incomplete_reason: str | None = None,
    usage: Usage | None = None,
    error: canonical.Json | None = None,
) -> canonical.Json:
    """Return the response object. Its default status is "completed", or "incomplete" with a reason."""
    return {
        "id": reply.id,
        "object": "response",
        "created_at": reply.created,
        "model": reply.model,
        **_DEFAULT_ECHO,
        **context.echoed_fields,
        "status": status or ("incomplete" if incomplete_reason else "completed"),
        "error": error,
        "incomplete_details": {"reason": incomplete_reason} if incomplete_reason else None,
        "output": items,
        "usage": None if usage is None else render_responses_usage(usage),
    }


def make_item_id(response_id: str, index: int) -> str:
    return f"item_{response_id.removeprefix('resp_')}_{index}"


def _is_representable(part: canonical.Part) -> bool:
    return isinstance(part, canonical.TextContent | canonical.RefusalContent | canonical.ToolCallContent) or (
        isinstance(part, canonical.ReasoningContent) and not part.redacted
    )


def _render_item(
    part: canonical.Part, id: str, choice: canonical.CanonicalChoice, context: ReplyContext
) -> canonical.Json:
    match part:
        case canonical.TextContent():
            content = render_text_part(part.text, choice.logprobs, list(map(render_responses_citation, part.citations)))
            return {"id": id, "type": "message", "status": "completed", "role": "assistant", "content": [content]}
        case canonical.RefusalContent():
            content = {"type": "refusal", "refusal": part.text}
            return {"id": id, "type": "message", "status": "completed", "role": "assistant", "content": [content]}
        case canonical.ToolCallContent():
            call = {"call_id": part.id, **render_tool_name(part.name, context), "arguments": part.arguments}
            return {"id": id, "type": "function_call", "status": "completed", **call}
        case canonical.ReasoningContent():
            summary = [{"type": "summary_text", "text": part.text}] if part.text else []
            encrypted_content = signatures.encode_signature(part.signature, part.origin, "openai-responses") or None
            return {"id": id, "type": "reasoning", "summary": summary, "encrypted_content": encrypted_content}
    raise AssertionError(f"a response cannot contain a {type(part).__name__}")


def render_text_part(
    text: str, logprobs: list[canonical.Json] | None, annotations: list[canonical.Json]
) -> canonical.Json:
    return {"type": "output_text", "text": text, "annotations": annotations, "logprobs": logprobs or []}
