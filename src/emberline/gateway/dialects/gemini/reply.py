"""Converts a generateContent reply to and from the canonical form; stream events have the same shape."""

from __future__ import annotations

from typing import Any

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.change_report import ChangeReport
from emberline.gateway.dialects.citations import assign_citations
from emberline.gateway.dialects.errors import make_stream_error
from emberline.gateway.dialects.field_reader import FieldReader
from emberline.gateway.dialects.gemini.citations import GroundingCollector, render_grounding
from emberline.gateway.dialects.gemini.content import GeminiContentParser, render_parts
from emberline.wire.deltas import FinishReason
from emberline.wire.finish_reasons import FROM_GEMINI, TO_GEMINI
from emberline.wire.reply_context import ReplyContext
from emberline.wire.usage import Usage
from emberline.wire.usage_objects import render_gemini_usage

_IGNORED_FIELDS = (
    "index",
    "safetyRatings",
    "avgLogprobs",
    "tokenCount",
    "usageMetadata",
    "promptFeedback",
    "createTime",
    "role",
)


def parse(body: canonical.Json, changes: ChangeReport) -> canonical.CanonicalReply:
    fields = FieldReader(body, "")
    if (error := fields.read_any("error")) is not None:
        raise make_stream_error({"error": error})
    id, model = fields.read("responseId", str, ""), fields.read("modelVersion", str, "")
    rows = fields.read("candidates", list, [])
    choices = [_parse_choice(raw, f"candidates[{index}]", id, changes) for index, raw in enumerate(rows)]
    if not choices:
        choices = [
            canonical.CanonicalChoice(
                [canonical.RefusalContent(read_block_message(fields.read("promptFeedback", dict, {})))], "filter"
            )
        ]
    changes.report_reply_fields(fields.unread, _IGNORED_FIELDS)
    return canonical.CanonicalReply("gemini", id, model, choices, usage=Usage.find_in("gemini", body))


def read_block_message(feedback: canonical.Json) -> str:
    """Return why Gemini blocked the prompt; raise UpstreamBroken if the reply gives no block reason."""
    if not feedback.get("blockReason"):
        raise UpstreamBroken("Gemini's reply has neither candidates nor a blockReason")
    return str(feedback.get("blockReasonMessage") or f"Gemini blocked the prompt: {feedback['blockReason']}")


def parse_finish_reason(finish_reason: str) -> FinishReason:
    if (reason := FROM_GEMINI.get(finish_reason)) is None:
        raise UpstreamBroken(f"Gemini ended its reply with finishReason {finish_reason}")
    return reason


def _parse_choice(raw: object, path: str, id: str, changes: ChangeReport) -> canonical.CanonicalChoice:
    fields = FieldReader(raw, path)
    parser = GeminiContentParser(f"{id}-" if id else "")
    content = parser.parse_message(dict(fields.read("content", dict, {}), role="model"), f"{path}.content")
    parts: list[canonical.Part] = []
    for part in content.parts:
        if isinstance(part, canonical.ToolCallContent) and (signature := part.extra.pop("thoughtSignature", "")):
            parts.append(canonical.ReasoningContent("", "gemini", signature))
        parts.append(part)
    reason = parse_finish_reason(fields.read("finishReason", str, "STOP"))
    logprobs = parse_logprobs(fields.read("logprobsResult", dict))
    grounding = GroundingCollector()
    grounding.add(fields.read_any("groundingMetadata"), fields.read_any("citationMetadata"))
    assign_citations(content.parts, grounding.build_citations(content.parts))
    changes.report_reply_fields(fields.unread | grounding.unused_metadata(), _IGNORED_FIELDS)
    return canonical.CanonicalChoice(parts, canonical.correct_finish_reason(reason, parts), logprobs=logprobs)


def render(reply: canonical.CanonicalReply, context: ReplyContext) -> canonical.Json:
    context.set_identity(reply)
    rows = []
    for index, choice in enumerate(reply.choices):
        has_refusal = any(isinstance(part, canonical.RefusalContent) for part in choice.parts)
        parts: list[canonical.Part] = [
            canonical.TextContent(part.text) if isinstance(part, canonical.RefusalContent) else part
            for part in choice.parts
        ]
        parts = [
            part
            for part in parts
            if not isinstance(part, canonical.OpaqueContent) and not getattr(part, "redacted", False)
        ]
        rendered_parts = render_parts(parts, {})
        row: canonical.Json = {"content": {"parts": rendered_parts, "role": "model"}}
        row |= {"finishReason": "SAFETY" if has_refusal else TO_GEMINI[choice.finish_reason or "stop"], "index": index}
        if choice.logprobs:
            row["logprobsResult"] = render_logprobs(choice.logprobs)
        text_indices = [
            part_index for part_index, part in enumerate(rendered_parts) if "text" in part and not part.get("thought")
        ]
        row |= render_grounding(
            zip(text_indices, [part for part in parts if isinstance(part, canonical.TextContent)], strict=True)
        )
        rows.append(row)
    body: canonical.Json = {"candidates": rows, "modelVersion": reply.model, "responseId": reply.id}
    if reply.usage is not None:
        body["usageMetadata"] = render_gemini_usage(reply.usage)
    return body


def parse_logprobs(result: canonical.Json | None) -> list[canonical.Json] | None:
    """Return the token logprobs in the format of OpenAI's chat."""
    if not result:
        return None
    chosen, top = result.get("chosenCandidates") or [], result.get("topCandidates") or []
    tokens = []
    for index, token in enumerate(chosen):
        others = (top[index].get("candidates") or []) if index < len(top) else []
        tokens.append(_parse_token(token) | {"top_logprobs": [_parse_token(other) for other in others]})
    return tokens


def _parse_token(candidate: canonical.Json) -> canonical.Json:
    text = str(candidate.get("token", ""))
    return {"token": text, "logprob": candidate.get("logProbability", 0.0), "bytes": list(text.encode())}


def render_logprobs(tokens: list[canonical.Json]) -> canonical.Json:
    def render_token(token: canonical.Json) -> dict[str, Any]:
        return {"token": token.get("token", ""), "logProbability": token.get("logprob", 0.0)}

    tops = [{"candidates": [render_token(other) for other in token.get("top_logprobs") or []]} for token in tokens]
    return {"chosenCandidates": [render_token(token) for token in tokens], "topCandidates": tops}
