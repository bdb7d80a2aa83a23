"""Converts an unstreamed response to and from the canonical form."""

from __future__ import annotations

from emberline.gateway.costs.usage import Usage
from emberline.gateway.dialects import counts, seals
from emberline.gateway.dialects.asked import Asked
from emberline.gateway.dialects.changes import Changes
from emberline.gateway.dialects.deltas import Opened
from emberline.gateway.dialects.fields import Fields
from emberline.gateway.dialects.finish import RESPONSES, TO_RESPONSES, settled
from emberline.gateway.dialects.inner import (
    Answer,
    Choice,
    Json,
    Part,
    Reason,
    Refusal,
    Text,
    Thinking,
    ToolCall,
)
from emberline.gateway.dialects.problems import raised
from emberline.gateway.dialects.responses import citations
from emberline.gateway.dialects.responses.items import parse_item
from emberline.gateway.errors import Broken

# Required fields of every reply that repeat the request, for requests without them.
_ECHO: Json = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


def parse(body: Json, changes: Changes) -> Answer:
    fields = Fields(body, "")
    if fields.left.get("status") in ("failed", "cancelled"):
        raise raised(
            {"error": fields.left.get("error") or {"message": f"the response has status {fields.left['status']!r}"}}
        )
    id, model = fields.take("id", str, ""), fields.take("model", str, "")
    parts: list[Part] = []
    logprobs: list[Json] = []
    for index, raw in enumerate(fields.need("output", list)):
        for part in parse_item(raw, f"output[{index}]").parts:
            if isinstance(part, Text):
                logprobs += part.extra.get("logprobs") or []
            parts.append(part)
    citations.lift(parts)
    reason = reason_of(fields.left.get("status"), fields.take("incomplete_details", dict))
    choice = Choice(parts, settled(reason, parts), logprobs=logprobs or None)
    created = int(fields.take("created_at", float, 0))
    return Answer("openai-responses", id, model, [choice], created, Usage.found("openai-responses", body))


def reason_of(status: object, details: Json | None) -> Reason:
    return "stop" if status != "incomplete" else RESPONSES.get(str((details or {}).get("reason")), "length")


def render(answer: Answer, context: Asked) -> Json:
    if not answer.choices:
        raise Broken("the provider's reply has no choices")
    context.name(answer)
    choice = answer.choices[0]
    incomplete_reason = TO_RESPONSES[choice.reason or "stop"]
    items = [
        _item(part, item_id(answer.id, index), choice) for index, part in enumerate(choice.parts) if _has_place(part)
    ]
    return response(answer, context, items, incomplete_reason=incomplete_reason, usage=answer.usage)


def response(
    reply: Answer | Opened,
    context: Asked,
    items: list[Json],
    *,
    status: str | None = None,
    incomplete_reason: str | None = None,
    usage: Usage | None = None,
    error: Json | None = None,
) -> Json:
    """Return the response object, complete or in progress."""
    return {
        "id": reply.id,
        "object": "response",
        "created_at": reply.created,
        "model": reply.model,
        **_ECHO,
        **context.echo,
        "status": status or ("incomplete" if incomplete_reason else "completed"),
        "error": error,
        "incomplete_details": {"reason": incomplete_reason} if incomplete_reason else None,
        "output": items,
        "usage": None if usage is None else counts.responses(usage),
    }


def item_id(response_id: str, index: int) -> str:
    return f"item_{response_id.removeprefix('resp_')}_{index}"


def _has_place(part: Part) -> bool:
    return isinstance(part, Text | Refusal | ToolCall) or (isinstance(part, Thinking) and not part.redacted)


def _item(part: Part, id: str, choice: Choice) -> Json:
    match part:
        case Text():
            content = text_part(part.text, choice.logprobs, list(map(citations.render, part.citations)))
            return {"id": id, "type": "message", "status": "completed", "role": "assistant", "content": [content]}
        case Refusal():
            content = {"type": "refusal", "refusal": part.text}
            return {"id": id, "type": "message", "status": "completed", "role": "assistant", "content": [content]}
        case ToolCall():
            call = {"call_id": part.id, "name": part.name, "arguments": part.arguments}
            return {"id": id, "type": "function_call", "status": "completed", **call}
        case Thinking():
            summary = [{"type": "summary_text", "text": part.text}] if part.text else []
            sealed = seals.shown(part.seal, part.family, "openai-responses") or None
            return {"id": id, "type": "reasoning", "summary": summary, "encrypted_content": sealed}
    raise AssertionError(f"{type(part).__name__} is not part of a response")


def text_part(text: str, logprobs: list[Json] | None, annotations: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": annotations, "logprobs": logprobs or []}
