"""Converts an unstreamed chat completion to and from the canonical form."""

from __future__ import annotations

from functools import partial

from emberline.gateway.core.usage import Usage
from emberline.gateway.dialects.canonical import (
    CanonicalChoice,
    CanonicalReply,
    Json,
    OpaqueContent,
    Part,
    ReasoningContent,
    RefusalContent,
    TextContent,
    ToolCallContent,
)
from emberline.gateway.dialects.change_report import ChangeReport
from emberline.gateway.dialects.chat import citations
from emberline.gateway.dialects.chat.content import (
    google_extra_content,
    mistral_reasoning_text,
    parse_assistant,
    render_tool_call,
)
from emberline.gateway.dialects.field_reader import FieldReader, parse_each
from emberline.gateway.dialects.finish_reasons import FROM_CHAT, TO_CHAT, correct_finish_reason
from emberline.gateway.dialects.reply_context import ReplyContext
from emberline.gateway.dialects.usage import render_chat_usage

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


def parse(body: Json, changes: ChangeReport) -> CanonicalReply:
    fields = FieldReader(body, "")
    id, model, created = fields.take("id", str, ""), fields.take("model", str, ""), fields.take("created", float, 0)
    choices = parse_each(fields.require("choices", list), "choices", partial(_parse_choice, changes=changes))
    changes.report_reply_fields(fields.unread, _IGNORED_FIELDS)
    return CanonicalReply("openai-chat", id, model, choices, int(created), Usage.find_in("openai-chat", body))


def _parse_choice(raw: object, path: str, changes: ChangeReport) -> CanonicalChoice:
    fields = FieldReader(raw, path)
    message = parse_assistant(FieldReader(fields.require("message", dict), f"{path}.message"))
    citations.extract_from_message(message)
    for index, part in enumerate(message.parts):
        if isinstance(part, OpaqueContent) and (reasoning := mistral_reasoning_text(part.raw)):
            message.parts[index] = ReasoningContent(reasoning, "openai-chat")
    reason = FROM_CHAT.get(fields.take("finish_reason", str, "stop"), "stop")
    logprobs = fields.take("logprobs", dict)
    tokens = logprobs.get("content") if logprobs else None
    changes.report_reply_fields(message.extra, _IGNORED_FIELDS)
    changes.report_reply_fields(fields.unread, _IGNORED_FIELDS)
    return CanonicalChoice(message.parts, correct_finish_reason(reason, message.parts), logprobs=tokens)


def render(reply: CanonicalReply, context: ReplyContext) -> Json:
    context.set_identity(reply)
    body: Json = {
        "id": reply.id,
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [_render_choice(index, choice) for index, choice in enumerate(reply.choices)],
    }
    if reply.usage is not None:
        body["usage"] = render_chat_usage(reply.usage)
    return body


def _render_choice(index: int, choice: CanonicalChoice) -> Json:
    logprobs = None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}
    reason = TO_CHAT[choice.finish_reason or "stop"]
    return {"index": index, "message": _render_message(choice.parts), "logprobs": logprobs, "finish_reason": reason}


def _render_message(parts: list[Part]) -> Json:
    """Render a choice: text joined in `content`; reasoning, refusal and calls in separate fields."""
    text, reasoning, refusal = [
        "".join(p.text for p in parts if isinstance(p, part_type))
        for part_type in (TextContent, ReasoningContent, RefusalContent)
    ]
    calls: list[Json] = []
    signature = ""
    for part in parts:
        if isinstance(part, ReasoningContent) and part.origin == "gemini":
            signature = part.signature
        elif isinstance(part, ToolCallContent):
            calls.append(render_tool_call(part) | google_extra_content(signature))
            signature = ""
    result: Json = {"role": "assistant", "content": text or (None if calls or refusal else "")}
    result["refusal"] = refusal or None
    if reasoning:
        result["reasoning_content"] = reasoning
    if calls:
        result["tool_calls"] = calls
    if annotations := citations.render_annotations(parts):
        result["annotations"] = annotations
    return result
