"""Converts an unstreamed Anthropic message to and from the canonical form."""

from __future__ import annotations

from emberline.gateway.costs.usage import Usage
from emberline.gateway.dialects import counts
from emberline.gateway.dialects.anthropic import citations
from emberline.gateway.dialects.anthropic.content import parse_blocks, render_part
from emberline.gateway.dialects.asked import Asked
from emberline.gateway.dialects.changes import Changes
from emberline.gateway.dialects.citations import pieces
from emberline.gateway.dialects.fields import Fields
from emberline.gateway.dialects.finish import ANTHROPIC, TO_ANTHROPIC
from emberline.gateway.dialects.inner import Answer, Choice, Image, Json, Opaque, Part, Refusal, Text
from emberline.gateway.errors import Broken

_IDLE = ("type", "role", "usage")


def parse(body: Json, changes: Changes) -> Answer:
    fields = Fields(body, "")
    id, model = fields.take("id", str, ""), fields.take("model", str, "")
    parts, _ = parse_blocks(fields.need("content", list), "content")
    citations.lift(parts)
    reason = ANTHROPIC.get(fields.take("stop_reason", str, "end_turn"), "stop")
    details = fields.take("stop_details", dict)
    if details and isinstance(details.get("explanation"), str):
        parts.append(Refusal(details["explanation"]))
    choice = Choice(parts, reason, fields.take("stop_sequence", str))
    changes.reply_left(fields.left, _IDLE)
    return Answer("anthropic", id, model, [choice], usage=Usage.found("anthropic", body))


def render(answer: Answer, context: Asked) -> Json:
    if not answer.choices:
        raise Broken("the provider's reply has no choices")
    context.name(answer)
    choice = answer.choices[0]
    stop_reason, stop_sequence = rendered_stop(choice.reason or "stop", choice.stop_sequence, _refuses(choice.parts))
    return {
        "id": answer.id,
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [block for part in choice.parts for block in _render(part)],
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": counts.anthropic(answer.usage or Usage()),
    }


def rendered_stop(reason: str, stop_sequence: str | None, refuses: bool) -> tuple[str, str | None]:
    """Return stop_reason and stop_sequence; a stop at an unknown sequence is reported as end_turn."""
    if refuses:
        return "refusal", None
    if reason == "stop_sequence" and stop_sequence is None:
        reason = "stop"
    return TO_ANTHROPIC[reason], stop_sequence  # type: ignore[index]  # a Reason


def _refuses(parts: list[Part]) -> bool:
    return any(isinstance(part, Refusal) for part in parts)


def _render(part: Part) -> list[Json]:
    match part:
        case Opaque() | Image():
            return []
        case Refusal():
            return _render(Text(part.text))
        case Text():
            rows = [(text, [citations.render(citation) for citation in cited]) for text, cited in pieces(part)]
            return [{"type": "text", "text": text, "citations": cited or None} for text, cited in rows]
    return [render_part(part)]
