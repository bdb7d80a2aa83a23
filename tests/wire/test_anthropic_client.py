"""The real Anthropic client against the real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from servers import start_server, stop_server

MODEL = "smollm2"
GREEDY = {"temperature": 0}  # not among the arguments of the client any more
FRANCE: Any = [{"role": "user", "content": "Name the capital of France."}]
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
        extra_body=GREEDY,
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


def test_unsupported_thinking_is_listed_as_ignored(client: anthropic.Anthropic) -> None:
    budget: Any = {"type": "enabled", "budget_tokens": 2}
    raw = client.messages.with_raw_response
    reply = raw.create(model=MODEL, max_tokens=4, messages=FRANCE, thinking=budget)
    assert "thinking" in reply.headers["x-emberline-ignored"]
    assert client.messages.count_tokens(model=MODEL, messages=FRANCE, thinking=budget).input_tokens > 0
    reply = raw.create(model=MODEL, max_tokens=4, messages=FRANCE, output_config={"effort": "low"})
    assert "output_config.effort" in reply.headers["x-emberline-ignored"]
    assert client.messages.create(model=MODEL, max_tokens=4, messages=FRANCE, thinking={"type": "disabled"}).content


THINKING = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>
{% else %}<think></think>{% endif %}"""


@pytest.fixture
def thinking_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[anthropic.Anthropic]:
    """A model whose prompt opens the reasoning; it never learnt to close it."""
    folder = tmp_path_factory.mktemp("thinker")
    (folder / "template").write_text(THINKING)
    options = ("--chat-template", str(folder / "template"), "--embedder", "none", "--kv-memory", "256M")
    started = start_server(folder / "log", *options)
    yield anthropic.Anthropic(base_url=started.url, api_key="none", max_retries=0, timeout=120)
    stop_server(started)


def test_thinking_budget_is_respected(thinking_client: anthropic.Anthropic) -> None:
    story = [{"role": "user", "content": "Write a long story about a city in France."}]
    ask: Any = {"model": MODEL, "max_tokens": 60, "messages": story, "extra_body": GREEDY}
    free = thinking_client.messages.create(**ask)
    assert [block.type for block in free.content] == ["thinking"]
    ask["thinking"] = {"type": "enabled", "budget_tokens": 5}
    held = thinking_client.messages.create(**ask)
    assert [block.type for block in held.content] == ["thinking", "text"]
    thought, text = held.content
    assert thought.type == "thinking" and text.type == "text" and text.text
    assert free.content[0].type == "thinking" and free.content[0].thinking.startswith(thought.thinking)
    assert held.usage.input_tokens + (held.usage.cache_read_input_tokens or 0) == free.usage.input_tokens
    assert 5 < held.usage.output_tokens <= 60
    with thinking_client.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in held.content]
    assert (final.stop_reason, final.usage.output_tokens) == (held.stop_reason, held.usage.output_tokens)
    off = thinking_client.messages.create(**{**ask, "thinking": {"type": "disabled"}})
    assert [block.type for block in off.content] == ["text"]
