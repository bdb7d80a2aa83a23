"""A generateContent reply of Gemini's, and the inner form's Answer. An event of its streams has the same shape."""

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
    said = Fields(body, "")
    if (error := said.raw("error")) is not None:
        raise raised({"error": error})
    id, model = said.take("responseId", str, ""), said.take("modelVersion", str, "")
    rows = said.take("candidates", list, [])
    choices = [_parse_choice(raw, f"candidates[{at}]", id, changes) for at, raw in enumerate(rows)]
    if not choices:
        choices = [Choice([Refusal(blocked(said.take("promptFeedback", dict, {})))], "filter")]
    changes.reply_left(said.left, _IDLE)
    return Answer("gemini", id, model, choices, usage=Usage.found("gemini", body))


def blocked(feedback: Json) -> str:
    """Why there is no answer at all: then the prompt was refused."""
    if not feedback.get("blockReason"):
        raise Broken("the reply has no answer in it")
    return str(feedback.get("blockReasonMessage") or f"the prompt was refused: {feedback['blockReason']}")


def reason_of(said: str) -> Reason:
    if (reason := GEMINI.get(said)) is None:
        raise Broken(f"Gemini gave no usable answer: {said}")
    return reason


def _parse_choice(raw: object, path: str, id: str, changes: Changes) -> Choice:
    said = Fields(raw, path)
    parser = ContentsParser(f"{id}-" if id else "")
    content = parser.message(dict(said.take("content", dict, {}), role="model"), f"{path}.content")
    parts: list[Part] = []
    for part in content.parts:
        if isinstance(part, ToolCall) and (seal := part.extra.pop("thoughtSignature", "")):
            parts.append(Thinking("", "gemini", seal))
        parts.append(part)
    reason = reason_of(said.take("finishReason", str, "STOP"))
    logprobs = logprobs_of(said.take("logprobsResult", dict))
    grounding = Grounding()
    grounding.add(said.raw("groundingMetadata"), said.raw("citationMetadata"))
    spread(content.parts, grounding.citations(content.parts))
    changes.reply_left(said.left | grounding.left(), _IDLE)
    return Choice(parts, settled(reason, parts), logprobs=logprobs)


def render(answer: Answer, asked: Asked) -> Json:
    asked.name(answer)
    rows = []
    for at, choice in enumerate(answer.choices):
        refuses = any(isinstance(part, Refusal) for part in choice.parts)
        parts: list[Part] = [Text(part.text) if isinstance(part, Refusal) else part for part in choice.parts]
        parts = [part for part in parts if not isinstance(part, Opaque) and not getattr(part, "redacted", False)]
        said = render_parts(parts, {})
        row: Json = {"content": {"parts": said, "role": "model"}}
        row |= {"finishReason": "SAFETY" if refuses else TO_GEMINI[choice.reason or "stop"], "index": at}
        if choice.logprobs:
            row["logprobsResult"] = logprobs_result(choice.logprobs)
        places = [place for place, part in enumerate(said) if "text" in part and not part.get("thought")]
        row |= render_citations(zip(places, [part for part in parts if isinstance(part, Text)], strict=True))
        rows.append(row)
    body: Json = {"candidates": rows, "modelVersion": answer.model, "responseId": answer.id}
    if answer.usage is not None:
        body["usageMetadata"] = counts.gemini(answer.usage)
    return body


def logprobs_of(result: Json | None) -> list[Json] | None:
    """As OpenAI's chat shows them."""
    if not result:
        return None
    chosen, top = result.get("chosenCandidates") or [], result.get("topCandidates") or []
    made = []
    for at, token in enumerate(chosen):
        others = (top[at].get("candidates") or []) if at < len(top) else []
        made.append(_token(token) | {"top_logprobs": [_token(other) for other in others]})
    return made


def _token(said: Json) -> Json:
    text = str(said.get("token", ""))
    return {"token": text, "logprob": said.get("logProbability", 0.0), "bytes": list(text.encode())}


def logprobs_result(tokens: list[Json]) -> Json:
    def told(token: Json) -> dict[str, Any]:
        return {"token": token.get("token", ""), "logProbability": token.get("logprob", 0.0)}

    tops = [{"candidates": [told(other) for other in token.get("top_logprobs") or []]} for token in tokens]
    return {"chosenCandidates": [told(token) for token in tokens], "topCandidates": tops}
