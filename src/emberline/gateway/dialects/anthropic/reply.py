"""Converts an unstreamed Anthropic message to and from the canonical form."""

from __future__ import annotations

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.anthropic import citations
from emberline.gateway.dialects.anthropic.content import parse_blocks, render_part
from emberline.gateway.dialects.change_report import ChangeReport
from emberline.gateway.dialects.citations import split_at_citations
from emberline.gateway.dialects.field_reader import FieldReader
from emberline.wire.anthropic import render_message, render_stop_fields
from emberline.wire.citations import render_anthropic_citation
from emberline.wire.deltas import Finish
from emberline.wire.finish_reasons import FROM_ANTHROPIC
from emberline.wire.reply_context import ReplyContext
from emberline.wire.usage import Usage
from emberline.wire.usage_objects import render_anthropic_usage

_IGNORED_FIELDS = ("type", "role", "usage")


def parse(body: canonical.Json, changes: ChangeReport) -> canonical.CanonicalReply:
    fields = FieldReader(body, "")
    id, model = fields.read("id", str, ""), fields.read("model", str, "")
    parts, _ = parse_blocks(fields.require("content", list), "content")
    citations.extract_citations_from_parts(parts)
    reason = FROM_ANTHROPIC.get(fields.read("stop_reason", str, "end_turn"), "stop")
    details = fields.read("stop_details", dict)
    if details and isinstance(details.get("explanation"), str):
        parts.append(canonical.RefusalContent(details["explanation"]))
    choice = canonical.CanonicalChoice(parts, reason, fields.read("stop_sequence", str))
    changes.report_reply_fields(fields.unread, _IGNORED_FIELDS)
    return canonical.CanonicalReply("anthropic", id, model, [choice], usage=Usage.find_in("anthropic", body))


def render(reply: canonical.CanonicalReply, context: ReplyContext) -> canonical.Json:
    if not reply.choices:
        raise UpstreamBroken("the provider's reply has no choices")
    context.set_identity(reply)
    choice = reply.choices[0]
    finish = Finish(choice.finish_reason or "stop", choice.stop_sequence)
    content = [block for part in choice.parts for block in _render_blocks(part)]
    stop, usage = render_stop_fields(finish, _has_refusal(choice.parts)), render_anthropic_usage(reply.usage or Usage())
    return render_message(reply.id, reply.model, content, stop, usage)


def _has_refusal(parts: list[canonical.Part]) -> bool:
    return any(isinstance(part, canonical.RefusalContent) for part in parts)


def _render_blocks(part: canonical.Part) -> list[canonical.Json]:
    match part:
        case canonical.OpaqueContent() | canonical.ImageContent():
            return []
        case canonical.RefusalContent():
            return _render_blocks(canonical.TextContent(part.text))
        case canonical.TextContent():
            rows = [
                (text, [render_anthropic_citation(citation) for citation in cited])
                for text, cited in split_at_citations(part)
            ]
            return [{"type": "text", "text": text, **({"citations": cited} if cited else {})} for text, cited in rows]
    return [render_part(part)]
