"""Usage of every provider is parsed into one form, streaming or not, whatever its values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.wire.usage import USAGE_READERS, Usage

OPENAI = {
    "prompt_tokens": 2006,
    "completion_tokens": 300,
    "total_tokens": 2306,
    "prompt_tokens_details": {"cached_tokens": 1920, "audio_tokens": 40},
    "completion_tokens_details": {"reasoning_tokens": 192, "audio_tokens": 0},
}
RESPONSES = {
    "input_tokens": 328,
    "input_tokens_details": {"cached_tokens": 128},
    "output_tokens": 52,
    "output_tokens_details": {"reasoning_tokens": 20},
    "total_tokens": 380,
}
CLAUDE = {
    "input_tokens": 21,
    "cache_creation_input_tokens": 188086,
    "cache_read_input_tokens": 1000,
    "cache_creation": {"ephemeral_5m_input_tokens": 186000, "ephemeral_1h_input_tokens": 2086},
    "output_tokens": 393,
}
GEMINI = {
    "promptTokenCount": 1500,
    "cachedContentTokenCount": 1024,
    "candidatesTokenCount": 80,
    "thoughtsTokenCount": 967,
    "toolUsePromptTokenCount": 30,
    "totalTokenCount": 2577,
    "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 1200}, {"modality": "AUDIO", "tokenCount": 300}],
}


@pytest.mark.parametrize(
    ("dialect", "data", "usage"),
    [
        ("openai-chat", OPENAI, Usage(input=2006, cached_read=1920, output=300, reasoning=192, audio=40)),
        ("openai-responses", RESPONSES, Usage(input=328, cached_read=128, output=52, reasoning=20)),
        ("openai-embeddings", {"prompt_tokens": 8, "total_tokens": 8}, Usage(input=8)),
        (
            "anthropic",
            CLAUDE,
            Usage(input=189107, cached_read=1000, cache_write=188086, output=393, cache_write_long=2086),
        ),
        ("gemini", GEMINI, Usage(input=1530, cached_read=1024, output=1047, reasoning=967, audio=300)),
    ],
)
def test_usage_of_each_dialect_is_parsed(dialect: str, data: dict[str, Any], usage: Usage) -> None:
    assert Usage.parse(dialect, data) == usage


@pytest.mark.parametrize(
    ("data", "usage"),
    [
        # DeepSeek has hits and misses beside the prompt's tokens
        (
            {
                "prompt_tokens": 100,
                "completion_tokens": 9,
                "total_tokens": 109,
                "prompt_cache_hit_tokens": 64,
                "prompt_cache_miss_tokens": 36,
            },
            Usage(input=100, cached_read=64, output=9),
        ),
        # xAI: reasoning is in the total and billed, but not in completion_tokens
        (
            {
                "prompt_tokens": 37,
                "completion_tokens": 530,
                "total_tokens": 800,
                "completion_tokens_details": {"reasoning_tokens": 233},
            },
            Usage(input=37, output=763, reasoning=233),
        ),
        # Gemini's OpenAI endpoint: reasoning is only in the total
        (
            {"prompt_tokens": 758, "completion_tokens": 102, "total_tokens": 1725},
            Usage(input=758, output=967, reasoning=865),
        ),
        # OpenRouter reports tokens written to a cache
        (
            {
                "prompt_tokens": 500,
                "completion_tokens": 5,
                "total_tokens": 505,
                "cost": 0.002,
                "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 400},
            },
            Usage(input=500, cache_write=400, output=5),
        ),
    ],
)
def test_usage_variants_of_openai_compatible_providers(data: dict[str, Any], usage: Usage) -> None:
    assert Usage.parse("openai-chat", data) == usage


@pytest.mark.parametrize(
    ("dialect", "events", "usage"),
    [
        ("openai-chat", [{"choices": [{}], "usage": None}, {"choices": [], "usage": OPENAI}], None),
        ("openai-chat", [{"choices": [{}]}, {"choices": [{}], "x_groq": {"id": "r", "usage": OPENAI}}], None),
        (
            "openai-responses",
            [
                {"type": "response.created", "response": {"usage": None}},
                {"type": "response.completed", "response": {"usage": RESPONSES}},
            ],
            None,
        ),
        (
            "anthropic",
            [
                {
                    "type": "message_start",
                    "message": {"usage": {"input_tokens": 25, "cache_read_input_tokens": 75, "output_tokens": 1}},
                },
                {"type": "ping"},
                {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 15}},
                {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 40, "input_tokens": None}},
            ],
            Usage(input=100, cached_read=75, output=40),
        ),
        (
            "gemini",
            [
                {"candidates": [], "usageMetadata": {"promptTokenCount": 10, "totalTokenCount": 10}},
                {"usageMetadata": {"promptTokenCount": 10, "candidatesTokenCount": 3, "totalTokenCount": 13}},
                {"usageMetadata": {"promptTokenCount": 10, "candidatesTokenCount": 8, "thoughtsTokenCount": 4}},
            ],
            Usage(input=10, output=12, reasoning=4),
        ),
    ],
)
def test_stream_usage_equals_reply_usage(dialect: str, events: list[dict[str, Any]], usage: Usage | None) -> None:
    total: Usage | None = None
    for event in events:
        if part := Usage.find_in(dialect, event):
            total = part if total is None else total.merge_later(part)
    whole = {"openai-chat": OPENAI, "openai-responses": RESPONSES}.get(dialect)
    assert total == (usage or Usage.parse(dialect, whole))


@pytest.mark.parametrize(
    ("reply", "usage"),
    [
        ({"usage": OPENAI}, Usage(input=2006, cached_read=1920, output=300, reasoning=192, audio=40)),
        (
            {
                "usage": {
                    "input_tokens": 10,
                    "cache_read_input_tokens": 5,
                    "cache_creation_input_tokens": 0,
                    "output_tokens": 2,
                }
            },
            Usage(input=15, cached_read=5, output=2),
        ),
        ({"usage": RESPONSES}, Usage(input=328, cached_read=128, output=52, reasoning=20)),
        ({"usageMetadata": {"promptTokenCount": 4}}, Usage(input=4)),
        (
            {"metadata": {"usage": {"inputTokens": 3, "outputTokens": 4, "cacheReadInputTokens": 7}}},
            Usage(input=10, cached_read=7, output=4),
        ),
        ({"meta": {"billed_units": {"input_tokens": 5.0, "output_tokens": 6.0}}}, Usage(input=5, output=6)),
        (
            {"type": "message-end", "delta": {"usage": {"tokens": {"input_tokens": 1, "output_tokens": 2}}}},
            Usage(1, output=2),
        ),
        ({"result": {"response": "hi", "usage": {"prompt_tokens": 1, "completion_tokens": 2}}}, Usage(1, output=2)),
        ({"output": "an image"}, None),
    ],
)
def test_raw_endpoint_usage_is_recognized(reply: dict[str, Any], usage: Usage | None) -> None:
    assert Usage.find_in("raw", reply) == usage


@pytest.mark.parametrize("absurd", [1e300, float("inf"), 1 << 54, -1])
def test_impossible_counts_are_ignored(absurd: float) -> None:
    assert Usage.parse("openai-chat", {"prompt_tokens": absurd, "completion_tokens": 3}) == Usage(output=3)
    assert Usage.parse("gemini", {"promptTokenCount": absurd, "totalTokenCount": absurd}) == Usage()


@pytest.mark.parametrize("data", [None, [], "usage", 3, {}, {"prompt_cache_hit_tokens": 4}])
@pytest.mark.parametrize("dialect", sorted(USAGE_READERS))
def test_missing_usage_is_none(dialect: str, data: object) -> None:
    assert Usage.parse(dialect, data) is None


NAMES = [
    *OPENAI,
    *RESPONSES,
    *CLAUDE,
    *GEMINI,
    "inputTokens",
    "outputTokens",
    "cacheReadInputTokens",
    "cached_tokens",
    "reasoning_tokens",
    "billed_units",
    "modality",
    "tokenCount",
]
LEAVES = st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats() | st.text(max_size=3)
SAID = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=8)
)


@given(st.sampled_from(sorted(USAGE_READERS)), SAID, SAID)
def test_parts_never_exceed_their_whole(dialect: str, one: object, two: object) -> None:
    first, second = Usage.parse(dialect, one), Usage.find_in(dialect, {"usage": two, "usageMetadata": two})
    if first and second:
        both = first.merge_later(second)  # Usage asserts its invariants
        assert both.total >= max(first.total, second.total)
