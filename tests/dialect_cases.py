"""The same request, reply and stream in each wire format: reasoning, an image, two tool calls."""

from __future__ import annotations

import json
from typing import Any

from emberline.wire.deltas import ChatDialect

DIALECTS: tuple[ChatDialect, ...] = ("openai-chat", "openai-responses", "anthropic", "gemini")
PAIRS = [(source, target) for source in DIALECTS for target in DIALECTS if source != target]
MODELS: dict[ChatDialect, str] = {
    "openai-chat": "gpt-5.2",
    "openai-responses": "gpt-5.2",
    "anthropic": "claude-opus-5",
    "gemini": "gemini-3-pro",
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "minLength": 2}}, "required": ["city"]}
PIXEL = "iVBORw0KGgo="

CHAT: dict[str, Any] = {
    "model": "gpt-5.2",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Where is this?"},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
            ],
        },
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "A city.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
                {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "sun"},
        {"role": "user", "content": "And?"},
    ],
    "tools": [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}],
    "tool_choice": "auto",
    "max_completion_tokens": 4000,
    "temperature": 0.5,
    "stop": ["END"],
    "seed": 7,
    "reasoning_effort": "medium",
    "stream": True,
    "stream_options": {"include_usage": True},
}
RESPONSES: dict[str, Any] = {
    "model": "gpt-5.2",
    "instructions": "Be brief.",
    "input": [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Where is this?"},
                {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"},
            ],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "A city."}],
            "encrypted_content": "c2VhbGVk",
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": '{"city":"Oslo"}'},
        {"type": "function_call", "id": "fc_2", "call_id": "call_2", "name": "weather", "arguments": '{"city":"Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {"type": "function_call_output", "call_id": "call_2", "output": "sun"},
        {"role": "user", "content": "And?"},
    ],
    "tools": [
        {"type": "function", "name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": False}
    ],
    "tool_choice": "auto",
    "max_output_tokens": 4000,
    "temperature": 0.5,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "store": False,
    "stream": True,
}
ANTHROPIC: dict[str, Any] = {
    "model": "claude-opus-5",
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Where is this?"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A city.", "signature": "c2lnbmVk"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "sun", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ],
    "tools": [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "max_tokens": 4000,
    "stop_sequences": ["END"],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "stream": True,
}
GEMINI: dict[str, Any] = {
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "contents": [
        {
            "role": "user",
            "parts": [{"text": "Where is this?"}, {"inlineData": {"mimeType": "image/png", "data": PIXEL}}],
        },
        {
            "role": "model",
            "parts": [
                {"text": "A city.", "thought": True},
                {"text": "Let me see."},
                {"functionCall": {"name": "weather", "args": {"city": "Oslo"}}, "thoughtSignature": "c2lnbmVk"},
                {"functionCall": {"name": "weather", "args": {"city": "Rome"}}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"name": "weather", "response": {"output": "rain"}}},
                {"functionResponse": {"name": "weather", "response": {"output": "sun"}}},
                {"text": "And?"},
            ],
        },
    ],
    "tools": [
        {
            "functionDeclarations": [
                {"name": "weather", "description": "of a city", "parametersJsonSchema": SCHEMA},
            ]
        }
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "generationConfig": {
        "maxOutputTokens": 4000,
        "temperature": 0.5,
        "stopSequences": ["END"],
        "seed": 7,
        "thinkingConfig": {"thinkingLevel": "medium", "includeThoughts": True},
    },
    "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
}
REQUESTS: dict[ChatDialect, dict[str, Any]] = {
    "openai-chat": CHAT,
    "openai-responses": RESPONSES,
    "anthropic": ANTHROPIC,
    "gemini": GEMINI,
}

# One reply: reasoning, a text, two tool calls; 30 input tokens (10 cached), 20 output tokens (5 of reasoning).
REPLIES: dict[ChatDialect, dict[str, Any]] = {
    "openai-chat": {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "gpt-5.2",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hé!",
                    "refusal": None,
                    "reasoning_content": "Hmm.",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
                        },
                        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
                    ],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {
            "prompt_tokens": 30,
            "completion_tokens": 20,
            "total_tokens": 50,
            "prompt_tokens_details": {"cached_tokens": 10},
            "completion_tokens_details": {"reasoning_tokens": 5},
        },
    },
    "openai-responses": {
        "id": "resp_1",
        "object": "response",
        "created_at": 1700000000,
        "status": "completed",
        "model": "gpt-5.2",
        "output": [
            {"id": "rs_1", "type": "reasoning", "summary": [{"type": "summary_text", "text": "Hmm."}]},
            {
                "id": "msg_1",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Hé!", "annotations": []}],
            },
            {"id": "f1", "type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'},
            {"id": "f2", "type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        ],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "error": None,
        "incomplete_details": None,
        "usage": {
            "input_tokens": 30,
            "input_tokens_details": {"cached_tokens": 10},
            "output_tokens": 20,
            "output_tokens_details": {"reasoning_tokens": 5},
            "total_tokens": 50,
        },
    },
    "anthropic": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-opus-5",
        "content": [
            {"type": "thinking", "thinking": "Hmm.", "signature": "c2lnbmVk"},
            {"type": "text", "text": "Hé!"},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 20,
            "cache_read_input_tokens": 10,
            "cache_creation_input_tokens": 0,
            "output_tokens": 20,
            "output_tokens_details": {"thinking_tokens": 5},
        },
    },
    "gemini": {
        "candidates": [
            {
                "content": {
                    "parts": [
                        {"text": "Hmm.", "thought": True},
                        {"text": "Hé!"},
                        {
                            "functionCall": {"id": "c1", "name": "weather", "args": {"city": "Oslo"}},
                            "thoughtSignature": "c2lnbmVk",
                        },
                        {"functionCall": {"id": "c2", "name": "now", "args": {}}},
                    ],
                    "role": "model",
                },
                "finishReason": "STOP",
                "index": 0,
            }
        ],
        "usageMetadata": {
            "promptTokenCount": 30,
            "cachedContentTokenCount": 10,
            "candidatesTokenCount": 15,
            "thoughtsTokenCount": 5,
            "totalTokenCount": 50,
        },
        "modelVersion": "gemini-3-pro",
        "responseId": "r1",
    },
}


def data(*payloads: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % (p if isinstance(p, bytes) else json.dumps(p).encode()) for p in payloads)


def named(*payloads: Any) -> bytes:
    return b"".join(b"event: %b\n" % payload["type"].encode() + data(payload) for payload in payloads)


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1700000000, "model": "gpt-5.2"}
    return {**head, "choices": [choice], **more}


def _tool(index: int, arguments: str, **more: Any) -> dict[str, Any]:
    name = {"name": more.pop("name")} if "name" in more else {}
    return {"tool_calls": [{"index": index, **more, "function": {**name, "arguments": arguments}}]}


def _item(index: int, **item: Any) -> dict[str, Any]:
    return {"output_index": index, "item": item}


_RESPONSE = {key: value for key, value in REPLIES["openai-responses"].items() if key not in ("output", "usage")}
_TEXT = {"item_id": "msg_1", "output_index": 1, "content_index": 0}
_CALL = {"type": "function_call", "call_id": "c1", "name": "weather"}
_NOW = {"type": "function_call", "call_id": "c2", "name": "now"}
_MESSAGE = {key: value for key, value in REPLIES["anthropic"].items() if key not in ("content", "stop_reason")}

# The same reply, streamed.
STREAMS: dict[ChatDialect, bytes] = {
    "openai-chat": data(
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "Hm"}),
        chunk({"reasoning_content": "m."}),
        chunk({"content": "Hé"}),
        chunk({"content": "!"}),
        chunk(_tool(0, "", id="c1", type="function", name="weather")),
        chunk(_tool(0, '{"city":')),
        chunk(_tool(0, '"Oslo"}')),
        chunk(_tool(1, "{}", id="c2", type="function", name="now")),
        chunk({}, "tool_calls"),
        {**chunk({}), "choices": [], "usage": REPLIES["openai-chat"]["usage"]},
        b"[DONE]",
    ),
    "openai-responses": named(
        {"type": "response.created", "response": {**_RESPONSE, "status": "in_progress", "output": []}},
        {"type": "response.in_progress", "response": {**_RESPONSE, "status": "in_progress", "output": []}},
        {"type": "response.output_item.added", **_item(0, id="rs_1", type="reasoning", summary=[])},
        {"type": "response.reasoning_summary_text.delta", "output_index": 0, "summary_index": 0, "delta": "Hm"},
        {"type": "response.reasoning_summary_text.delta", "output_index": 0, "summary_index": 0, "delta": "m."},
        {"type": "response.output_item.done", **_item(0, id="rs_1", type="reasoning", summary=[])},
        {"type": "response.output_item.added", **_item(1, id="msg_1", type="message", role="assistant", content=[])},
        {"type": "response.output_text.delta", **_TEXT, "delta": "Hé", "logprobs": []},
        {"type": "response.output_text.delta", **_TEXT, "delta": "!", "logprobs": []},
        {"type": "response.output_item.added", **_item(2, id="f1", arguments="", **_CALL)},
        {"type": "response.function_call_arguments.delta", "item_id": "f1", "output_index": 2, "delta": '{"city":'},
        {"type": "response.function_call_arguments.delta", "item_id": "f1", "output_index": 2, "delta": '"Oslo"}'},
        {"type": "response.output_item.done", **_item(2, id="f1", arguments='{"city":"Oslo"}', **_CALL)},
        {"type": "response.output_item.added", **_item(3, id="f2", arguments="", **_NOW)},
        {"type": "response.output_item.done", **_item(3, id="f2", arguments="{}", **_NOW)},
        {"type": "response.completed", "response": REPLIES["openai-responses"]},
    ),
    "anthropic": named(
        {"type": "message_start", "message": {**_MESSAGE, "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "m."}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "c2lnbmVk"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hé"}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "!"}},
        {"type": "content_block_stop", "index": 1},
        {
            "type": "content_block_start",
            "index": 2,
            "content_block": {"type": "tool_use", "id": "c1", "name": "weather", "input": {}},
        },
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": ""}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"city":'}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '"Oslo"}'}},
        {"type": "content_block_stop", "index": 2},
        {
            "type": "content_block_start",
            "index": 3,
            "content_block": {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
        },
        {"type": "content_block_stop", "index": 3},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"output_tokens": 20, "output_tokens_details": {"thinking_tokens": 5}},
        },
        {"type": "message_stop"},
    ),
    "gemini": data(
        *(
            {"candidates": [{"content": {"parts": parts, "role": "model"}, "index": 0}], "responseId": "r1",
             "modelVersion": "gemini-3-pro", "usageMetadata": {"promptTokenCount": 30, "totalTokenCount": 30}}
            for parts in (
                [{"text": "Hm", "thought": True}],
                [{"text": "m.", "thought": True}],
                [{"text": "Hé"}],
                [{"text": "!"}],
                REPLIES["gemini"]["candidates"][0]["content"]["parts"][2:],
            )
        ),
        {
            "candidates": [{"content": {"parts": [{"text": ""}], "role": "model"}, "finishReason": "STOP", "index": 0}],
            "usageMetadata": REPLIES["gemini"]["usageMetadata"],
            "modelVersion": "gemini-3-pro",
            "responseId": "r1",
        },
    ),
}  # fmt: skip
