"""The real Anthropic client against the real server."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

MODEL = "smollm2"
GREEDY = {"temperature": 0}  # not among the arguments of the client any more
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(running: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0, timeout=120)


def test_messages(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(model=MODEL, max_tokens=30, messages=FRANCE, extra_body=GREEDY)
    assert reply.content[0].type == "text" and "Paris" in reply.content[0].text
    assert reply.stop_reason == "end_turn" and reply.usage.output_tokens > 3


def test_streamed_messages(client: anthropic.Anthropic) -> None:
    plain = client.messages.create(model=MODEL, max_tokens=30, messages=FRANCE, extra_body=GREEDY)
    with client.messages.stream(model=MODEL, max_tokens=30, messages=FRANCE, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 3 and plain.content[0].type == "text" and "".join(pieces) == plain.content[0].text
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == plain.usage.output_tokens
    assert (final.usage.cache_read_input_tokens or 0) > 0


def test_tool_use(client: anthropic.Anthropic) -> None:
    ask: Any = {
        "model": MODEL,
        "max_tokens": 120,
        "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "messages": [{"role": "user", "content": "Weather in Paris?"}],
        "extra_body": GREEDY,
    }
    reply = client.messages.create(**ask)
    calls = [block for block in reply.content if block.type == "tool_use"]
    assert reply.stop_reason == "tool_use" and len(calls) == 1
    assert calls[0].name == "get_weather" and set(calls[0].input) == {"city"}
    with client.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    assert [b.input for b in final.content if b.type == "tool_use"] == [calls[0].input]
    answer = client.messages.create(
        model=MODEL,
        max_tokens=20,
        tools=[WEATHER],
        tool_choice={"type": "none"},
        messages=[
            *ask["messages"],
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": calls[0].id, "content": "21 degrees"}]},
        ],
    )
    assert answer.content[0].type == "text"


def test_limits_and_stop_sequences(client: anthropic.Anthropic) -> None:
    cut = client.messages.create(model=MODEL, max_tokens=2, messages=FRANCE, extra_body=GREEDY)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 2
    stopped = client.messages.create(
        model=MODEL, max_tokens=30, messages=FRANCE, extra_body=GREEDY, stop_sequences=["France"]
    )
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == "France"


def test_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=FRANCE)
    reply = client.messages.create(model=MODEL, max_tokens=1, messages=FRANCE)
    assert counted.input_tokens == reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)


def test_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", max_tokens=4, messages=FRANCE)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=MODEL, max_tokens=4, messages=FRANCE, extra_body={"temperature": -1})
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=MODEL, max_tokens=4, messages=FRANCE, extra_body={"no_such_field": 1})
