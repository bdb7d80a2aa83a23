"""Converts a generateContent reply to and from the canonical form; stream events have the same shape."""

from __future__ import annotations

from typing import Any

from emberline.gateway.costs.usage import Usage
from emberline.gateway.dialects import counts
from emberline.gateway.dialects.asked import Asked
from emberline.gateway.dialects.changes import Changes
from emberline.gateway.dialects.citations import spread
from emberline.gateway.dialects.fields import Fields
from emberline.gateway.dialects.finish import GEMINI, TO_GEMINI, settled
from emberline.gateway.dialects.gemini.citations import Grounding
from emberline.gateway.dialects.gemini.citations import render as render_citations
from emberline.gateway.dialects.gemini.content import ContentsParser, render_parts
from emberline.gateway.dialects.inner import (
    Answer,
    Choice,
    Json,
    Opaque,
    Part,
    Reason,
    Refusal,
    Text,
    Thinking,
    ToolCall,
)
from emberline.gateway.dialects.problems import raised
from emberline.gateway.errors import Broken

_IDLE = ("index", "safetyRatings", "avgLogprobs", "tokenCount", "usageMetadata", "promptFeedback", "createTime", "role")


def parse(body: Json, changes: Changes) -> Answer:
    fields = Fields(body, "")
    if (error := fields.raw("error")) is not None:
        raise raised({"error": error})
    id, model = fields.take("responseId", str, ""), fields.take("modelVersion", str, "")
    rows = fields.take("candidates", list, [])
    choices = [_parse_choice(raw, f"candidates[{index}]", id, changes) for index, raw in enumerate(rows)]
    if not choices:
        choices = [Choice([Refusal(blocked(fields.take("promptFeedback", dict, {})))], "filter")]
    changes.reply_left(fields.left, _IDLE)
    return Answer("gemini", id, model, choices, usage=Usage.found("gemini", body))


def blocked(feedback: Json) -> str:
    """Return why Gemini blocked the prompt; raise Broken if the reply gives no block reason."""
    if not feedback.get("blockReason"):
        raise Broken("Gemini's reply has neither candidates nor a blockReason")
    return str(feedback.get("blockReasonMessage") or f"Gemini blocked the prompt: {feedback['blockReason']}")


def reason_of(finish_reason: str) -> Reason:
    if (reason := GEMINI.get(finish_reason)) is None:
        raise Broken(f"Gemini ended its reply with finishReason {finish_reason}")
    return reason


def _parse_choice(raw: object, path: str, id: str, changes: Changes) -> Choice:
    fields = Fields(raw, path)
    parser = ContentsParser(f"{id}-" if id else "")
    content = parser.message(dict(fields.take("content", dict, {}), role="model"), f"{path}.content")
    parts: list[Part] = []
    for part in content.parts:
        if isinstance(part, ToolCall) and (signature := part.extra.pop("thoughtSignature", "")):
            parts.append(Thinking("", "gemini", signature))
        parts.append(part)
    reason = reason_of(fields.take("finishReason", str, "STOP"))
    logprobs = logprobs_of(fields.take("logprobsResult", dict))
    grounding = Grounding()
    grounding.add(fields.raw("groundingMetadata"), fields.raw("citationMetadata"))
    spread(content.parts, grounding.citations(content.parts))
    changes.reply_left(fields.left | grounding.left(), _IDLE)
    return Choice(parts, settled(reason, parts), logprobs=logprobs)


def render(answer: Answer, context: Asked) -> Json:
    context.name(answer)
    rows = []
    for index, choice in enumerate(answer.choices):
        refuses = any(isinstance(part, Refusal) for part in choice.parts)
        parts: list[Part] = [Text(part.text) if isinstance(part, Refusal) else part for part in choice.parts]
        parts = [part for part in parts if not isinstance(part, Opaque) and not getattr(part, "redacted", False)]
        fields = render_parts(parts, {})
        row: Json = {"content": {"parts": fields, "role": "model"}}
        row |= {"finishReason": "SAFETY" if refuses else TO_GEMINI[choice.reason or "stop"], "index": index}
        if choice.logprobs:
            row["logprobsResult"] = logprobs_result(choice.logprobs)
        places = [place for place, part in enumerate(fields) if "text" in part and not part.get("thought")]
        row |= render_citations(zip(places, [part for part in parts if isinstance(part, Text)], strict=True))
        rows.append(row)
    body: Json = {"candidates": rows, "modelVersion": answer.model, "responseId": answer.id}
    if answer.usage is not None:
        body["usageMetadata"] = counts.gemini(answer.usage)
    return body


def logprobs_of(result: Json | None) -> list[Json] | None:
    """Return the token logprobs in the format of OpenAI's chat."""
    if not result:
        return None
    chosen, top = result.get("chosenCandidates") or [], result.get("topCandidates") or []
    tokens = []
    for index, token in enumerate(chosen):
        others = (top[index].get("candidates") or []) if index < len(top) else []
        tokens.append(_token(token) | {"top_logprobs": [_token(other) for other in others]})
    return tokens


def _token(candidate: Json) -> Json:
    text = str(candidate.get("token", ""))
    return {"token": text, "logprob": candidate.get("logProbability", 0.0), "bytes": list(text.encode())}


def logprobs_result(tokens: list[Json]) -> Json:
    def render_token(token: Json) -> dict[str, Any]:
        return {"token": token.get("token", ""), "logProbability": token.get("logprob", 0.0)}

    tops = [{"candidates": [render_token(other) for other in token.get("top_logprobs") or []]} for token in tokens]
    return {"chosenCandidates": [render_token(token) for token in tokens], "topCandidates": tops}
