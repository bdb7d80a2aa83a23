"""Maps finish reasons between wire formats. A reason without an equivalent is mapped to the most similar one."""

from __future__ import annotations

from collections.abc import Mapping

from emberline.wire.deltas import FinishReason

FROM_CHAT: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "filter",
}
FROM_ANTHROPIC: Mapping[str, FinishReason] = {
    "end_turn": "stop",
    "stop_sequence": "stop_sequence",
    "max_tokens": "length",
    "model_context_window_exceeded": "context",
    "tool_use": "tool_calls",
    "refusal": "filter",
    "pause_turn": "pause",
}
FROM_GEMINI: Mapping[str, FinishReason] = {
    "STOP": "stop",
    "MAX_TOKENS": "length",
    "SAFETY": "filter",
    "RECITATION": "filter",
    "BLOCKLIST": "filter",
    "PROHIBITED_CONTENT": "filter",
    "SPII": "filter",
    "IMAGE_SAFETY": "filter",
    "IMAGE_PROHIBITED_CONTENT": "filter",
    "IMAGE_RECITATION": "filter",
    "LANGUAGE": "filter",
    "CONTINUATION": "pause",
}
# `incomplete_details.reason` of a response that is not completed.
FROM_RESPONSES: Mapping[str, FinishReason] = {"max_output_tokens": "length", "content_filter": "filter"}

TO_CHAT: Mapping[FinishReason, str] = {
    "stop": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "context": "length",
    "tool_calls": "tool_calls",
    "filter": "content_filter",
    "pause": "stop",
    "abort": "abort",
}
TO_ANTHROPIC: Mapping[FinishReason, str] = {
    "stop": "end_turn",
    "stop_sequence": "stop_sequence",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "tool_calls": "tool_use",
    "filter": "refusal",
    "pause": "pause_turn",
    "abort": "pause_turn",  # the client may send the reply back to have it continued
}
TO_GEMINI: Mapping[FinishReason, str] = {
    "stop": "STOP",
    "stop_sequence": "STOP",
    "length": "MAX_TOKENS",
    "context": "MAX_TOKENS",
    "tool_calls": "STOP",  # Gemini has no reason for tool calls
    "filter": "SAFETY",
    "pause": "STOP",
    "abort": "OTHER",
}
TO_RESPONSES: Mapping[FinishReason, str | None] = {  # None: completed
    "stop": None,
    "stop_sequence": None,
    "length": "max_output_tokens",
    "context": "max_output_tokens",
    "tool_calls": None,
    "filter": "content_filter",
    "pause": None,
    "abort": None,
}
# Ollama has two reasons. A reply that is incomplete for any reason has "length".
TO_OLLAMA: Mapping[FinishReason, str] = {
    "stop": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "context": "length",
    "tool_calls": "stop",
    "filter": "stop",
    "pause": "length",
    "abort": "length",
}
