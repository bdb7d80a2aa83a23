"""Converts an unstreamed chat completion to and from the canonical form."""

from __future__ import annotations

from functools import partial

from emberline.gateway.costs.usage import Usage
from emberline.gateway.dialects import counts
from emberline.gateway.dialects.asked import Asked
from emberline.gateway.dialects.changes import Changes
from emberline.gateway.dialects.chat import citations
from emberline.gateway.dialects.chat.content import google_extra, parse_assistant, render_call, thought_of
from emberline.gateway.dialects.fields import Fields, each
from emberline.gateway.dialects.finish import CHAT, TO_CHAT, settled
from emberline.gateway.dialects.inner import Answer, Choice, Json, Opaque, Part, Refusal, Text, Thinking, ToolCall

_IDLE = ("object", "system_fingerprint", "service_tier", "usage", "metadata", "index", "x_groq", "stop_reason", "role")


def parse(body: Json, changes: Changes) -> Answer:
    fields = Fields(body, "")
    id, model, created = fields.take("id", str, ""), fields.take("model", str, ""), fields.take("created", float, 0)
    choices = each(fields.need("choices", list), "choices", partial(_parse_choice, changes=changes))
    changes.reply_left(fields.left, _IDLE)
    return Answer("openai-chat", id, model, choices, int(created), Usage.found("openai-chat", body))


def _parse_choice(raw: object, path: str, changes: Changes) -> Choice:
    fields = Fields(raw, path)
    message = parse_assistant(Fields(fields.need("message", dict), f"{path}.message"))
    citations.lift(message)
    for index, part in enumerate(message.parts):
        if isinstance(part, Opaque) and (thought := thought_of(part.raw)):
            message.parts[index] = Thinking(thought, "openai-chat")
    reason = CHAT.get(fields.take("finish_reason", str, "stop"), "stop")
    logprobs = fields.take("logprobs", dict)
    tokens = logprobs.get("content") if logprobs else None
    changes.reply_left(message.extra, _IDLE)
    changes.reply_left(fields.left, _IDLE)
    return Choice(message.parts, settled(reason, message.parts), logprobs=tokens)


def render(answer: Answer, context: Asked) -> Json:
    context.name(answer)
    body: Json = {
        "id": answer.id,
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [_render_choice(index, choice) for index, choice in enumerate(answer.choices)],
    }
    if answer.usage is not None:
        body["usage"] = counts.chat(answer.usage)
    return body


def _render_choice(index: int, choice: Choice) -> Json:
    logprobs = None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}
    reason = TO_CHAT[choice.reason or "stop"]
    return {"index": index, "message": _message(choice.parts), "logprobs": logprobs, "finish_reason": reason}


def _message(parts: list[Part]) -> Json:
    """Render a choice: text joined in `content`; reasoning, refusal and calls in separate fields."""
    texts, thoughts, refusals = ["".join(p.text for p in parts if isinstance(p, k)) for k in (Text, Thinking, Refusal)]
    calls: list[Json] = []
    signature = ""
    for part in parts:
        if isinstance(part, Thinking) and part.family == "gemini":
            signature = part.seal
        elif isinstance(part, ToolCall):
            calls.append(render_call(part) | google_extra(signature))
            signature = ""
    result: Json = {"role": "assistant", "content": texts or (None if calls or refusals else "")}
    result["refusal"] = refusals or None
    if thoughts:
        result["reasoning_content"] = thoughts
    if calls:
        result["tool_calls"] = calls
    if annotations := citations.render_all(parts):
        result["annotations"] = annotations
    return result
