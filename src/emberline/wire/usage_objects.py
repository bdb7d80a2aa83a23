"""Renders token usage as the usage object of each wire format. `Usage.parse` reads such objects."""

from __future__ import annotations

from emberline.wire.deltas import Json
from emberline.wire.usage import EngineUsage, Usage


def render_chat_usage(usage: Usage, *, from_engine: bool = False) -> Json:
    """Render the usage. With `from_engine`, the counts that only providers report are left out."""
    prompt_details = {"cached_tokens": usage.cached_read}
    if not from_engine:
        prompt_details |= {"cache_write_tokens": usage.cache_write, "audio_tokens": usage.audio}
    if usage.image:
        prompt_details["image_tokens"] = usage.image
    completion_details = {"reasoning_tokens": usage.reasoning}
    if isinstance(usage, EngineUsage):
        completion_details["accepted_prediction_tokens"] = usage.accepted_drafts
        completion_details["rejected_prediction_tokens"] = usage.rejected_drafts
    return {
        "prompt_tokens": usage.input,
        "completion_tokens": usage.output,
        "total_tokens": usage.total,
        "prompt_tokens_details": prompt_details,
        "completion_tokens_details": completion_details,
    }


def render_responses_usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached_read, "cache_write_tokens": usage.cache_write},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.total,
    }


def render_anthropic_usage(usage: Usage) -> Json:
    """Render the usage; Anthropic's input_tokens exclude tokens read from and written to the cache."""
    return {
        "input_tokens": usage.input - usage.cached_read - usage.cache_write,
        "cache_creation_input_tokens": usage.cache_write,
        "cache_read_input_tokens": usage.cached_read,
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def render_gemini_usage(usage: Usage) -> Json:
    """Render the usage; Gemini's candidatesTokenCount excludes reasoning tokens."""
    result = {
        "promptTokenCount": usage.input,
        "candidatesTokenCount": usage.output - usage.reasoning,
        "totalTokenCount": usage.total,
    }
    if usage.cached_read:
        result["cachedContentTokenCount"] = usage.cached_read
    if usage.reasoning:
        result["thoughtsTokenCount"] = usage.reasoning
    return result
