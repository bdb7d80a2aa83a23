"""The real OpenAI client against the real server."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest

MODEL = "smollm2"
FRANCE: Any = [{"role": "user", "content": "Name the capital of France."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
PERSON: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(running: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert (
        reply.usage is not None
        and reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    )


def test_streamed_chat_equals_plain_chat(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert len(pieces) > 3 and "".join(pieces) == plain.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage is not None and plain.usage is not None and usage.completion_tokens == plain.usage.completion_tokens
    assert usage.prompt_tokens_details is not None and (usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_seeded_choices_repeat_and_differ(client: openai.OpenAI) -> None:
    def texts() -> list[str | None]:
        reply = client.chat.completions.create(
            model=MODEL, messages=FRANCE, temperature=1.2, n=3, seed=7, max_tokens=12
        )
        return [choice.message.content for choice in sorted(reply.choices, key=lambda c: c.index)]

    first = texts()
    assert first == texts() and len(set(first)) == 3


def test_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = reply.choices[0].logprobs and reply.choices[0].logprobs.content
    assert content and len(content) == 5
    for token in content:
        assert token.logprob == token.top_logprobs[0].logprob and len(token.top_logprobs) == 3
        assert bytes(token.bytes or []).decode() == token.token
        assert sum(math.exp(t.logprob) for t in token.top_logprobs) <= 1.0001


def test_json_schema(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe a person."}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
        seed=1,
        max_tokens=200,
    )
    person = json.loads(reply.choices[0].message.content or "")
    assert set(person) == {"name", "age"} and isinstance(person["age"], int)


def test_json_object_and_regex_and_choice(client: openai.OpenAI) -> None:
    ask: Any = {"model": MODEL, "messages": FRANCE, "max_tokens": 60, "seed": 3}
    reply = client.chat.completions.create(**ask, response_format={"type": "json_object"})
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content or ""), dict)
    reply = client.chat.completions.create(**ask, extra_body={"guided_regex": r"[0-9]{3}-[a-f]{2}"})
    text = reply.choices[0].message.content or ""
    assert len(text) == 6 and text[3] == "-" and text[:3].isdigit()
    reply = client.chat.completions.create(**ask, extra_body={"guided_choice": ["red", "green"]})
    assert reply.choices[0].message.content in ("red", "green")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_required_tool_is_called(client: openai.OpenAI, choice: Any) -> None:
    ask: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "seed": 5,
        "max_tokens": 120,
    }
    reply = client.chat.completions.create(**ask)
    assert reply.choices[0].finish_reason == "tool_calls"
    calls = reply.choices[0].message.tool_calls or []
    assert len(calls) == 1 and calls[0].type == "function" and calls[0].function.name == "get_weather"
    arguments = json.loads(calls[0].function.arguments)
    assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("celsius", "fahrenheit")

    streamed: dict[int, str] = {}
    chunks = list(client.chat.completions.create(**ask, stream=True))
    for chunk in chunks:
        for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            streamed[call.index] = streamed.get(call.index, "") + ((call.function and call.function.arguments) or "")
    assert [json.loads(text) for text in streamed.values()] == [arguments]
    assert sum(1 for c in chunks if c.choices and c.choices[0].delta.tool_calls) > 3, "arguments come in pieces"


def test_tool_result_continues_conversation(client: openai.OpenAI) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "celsius"}'},
    }
    messages: Any = [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees, sunny"},
    ]
    reply = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=30, seed=5
    )
    assert reply.choices[0].message.content and not reply.choices[0].message.tool_calls


def test_completions_with_echo_and_prompt_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=3, temperature=0, echo=True, logprobs=1
    )
    choice = reply.choices[0]
    assert choice.text.startswith("The capital of France is") and "Paris" in choice.text
    assert (
        choice.logprobs is not None
        and choice.logprobs.tokens is not None
        and choice.logprobs.token_logprobs is not None
    )
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None and all(p <= 0 for p in choice.logprobs.token_logprobs[1:])
    scored = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=0, echo=True, logprobs=1
    )
    assert scored.choices[0].text == "The capital of France is"


def test_several_prompts_stop_strings_and_length(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt=["One, two, three,", "A B C"], max_tokens=8, temperature=0, stop=["six"]
    )
    assert len(reply.choices) == 2
    assert all("six" not in choice.text for choice in reply.choices)
    cut = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=4, temperature=0)
    assert cut.choices[0].finish_reason == "length" and cut.usage is not None and cut.usage.completion_tokens == 4


def test_responses(client: openai.OpenAI) -> None:
    reply = client.responses.create(model=MODEL, input="Name the capital of France.", temperature=0, store=False)
    assert "Paris" in reply.output_text and reply.status == "completed"
    events = list(client.responses.create(model=MODEL, input="Name the capital of France.", temperature=0, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == reply.output_text


def test_embeddings(client: openai.OpenAI) -> None:
    reply = client.embeddings.create(
        model="minilm", input=["a cat sits", "a kitten is sitting", "the stock market fell"]
    )
    a, b, c = (item.embedding for item in reply.data)
    assert len(a) == 384 and sum(x * x for x in a) == pytest.approx(1, abs=1e-3)
    assert sum(x * y for x, y in zip(a, b, strict=True)) > 0.5 > sum(x * y for x, y in zip(a, c, strict=True))


def test_models(client: openai.OpenAI) -> None:
    assert {m.id for m in client.models.list()} == {"smollm2", "minilm"}
    assert client.models.retrieve("smollm2").id == "smollm2"


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (openai.NotFoundError, {"model": "gpt-4o"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "word " * 20_000}]}),
        (openai.BadRequestError, {"extra_body": {"guided_regex": "(unclosed"}}),
        (openai.BadRequestError, {"logit_bias": {"999999": 1}}),
    ],
)
def test_errors_are_typed_and_name_the_field(
    client: openai.OpenAI, error: type[openai.APIStatusError], change: dict[str, Any]
) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "max_tokens": 4}
    with pytest.raises(error) as raised:
        client.chat.completions.create(**{**ask, **change})
    assert raised.value.param is not None and raised.value.code
    with pytest.raises(error):  # the same before a stream begins
        client.chat.completions.create(**{**ask, **change}, stream=True)


def test_response_format_with_optional_tools(client: openai.OpenAI) -> None:
    """Either the form or a call, never anything else."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for seed in range(3):
        reply = client.chat.completions.create(
            model=MODEL, messages=FRANCE, tools=[WEATHER], response_format=form, seed=seed, parallel_tool_calls=False
        )
        choice = reply.choices[0]
        if choice.finish_reason == "tool_calls":
            call = (choice.message.tool_calls or [])[0]
            assert call.type == "function" and set(json.loads(call.function.arguments)) == {"city", "unit"}
        else:
            assert set(json.loads(choice.message.content or "")) == {"name", "age"}


RESULT = '{"degrees": 3}'
FORCED: Any = {"type": "function", "function": {"name": "get_weather"}}


def continue_conversation(client: openai.OpenAI, message: dict[str, Any], call_id: str) -> None:
    answer = {"role": "tool", "tool_call_id": call_id, "content": RESULT}
    messages: Any = [*FRANCE, message, answer]
    until_full: Any = {"max_tokens": 4, "extra_body": {"ignore_eos": True}}
    reply = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], **until_full)
    assert reply.choices[0].finish_reason == "length"


def test_stream_helper_message_round_trips(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": FRANCE, "tools": [WEATHER], "tool_choice": FORCED, "temperature": 0}
    with client.chat.completions.stream(**asked) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or []
    dumped = message.model_dump()
    assert dumped["tool_calls"][0]["function"]["parsed_arguments"]
    continue_conversation(client, dumped, call.id)


def test_streamed_tool_calls_round_trip(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": FRANCE, "tools": [WEATHER], "tool_choice": FORCED, "temperature": 0}
    merged: dict[int, dict[str, Any]] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            call = merged.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            call |= {name: value for name in ("id", "type") if (value := getattr(piece, name)) is not None}
            assert piece.function is not None
            call["function"]["arguments"] += piece.function.arguments or ""
            call["function"] |= {"name": piece.function.name} if piece.function.name else {}
    message = {"role": "assistant", "content": None, "tool_calls": list(merged.values())}
    continue_conversation(client, message, merged[0]["id"])


def test_stored_response_lifecycle(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "max_output_tokens": 4, "temperature": 0}
    first = client.responses.create(**asked, input="My name is Ada.")
    second = client.responses.create(**asked, input="What is my name?", previous_response_id=first.id)
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 4
    assert client.responses.retrieve(first.id).output_text == first.output_text
    listed = client.responses.input_items.list(second.id, order="asc")
    assert [item.role for item in listed.data if item.type == "message"] == ["user", "assistant", "user"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_bad_words_and_logit_bias(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 12}
    assert "Paris" in (client.chat.completions.create(**asked).choices[0].message.content or "")
    without = client.chat.completions.create(**asked, extra_body={"bad_words": ["Paris"]})
    assert "Paris" not in (without.choices[0].message.content or "")
    ids = {"allowed_token_ids": [28, 29, 30], "return_token_ids": True}
    choice = client.chat.completions.create(**asked, extra_body=ids).choices[0]
    assert choice.model_extra is not None and set(choice.model_extra["token_ids"]) <= {28, 29, 30}


def test_ignored_hints_are_listed(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": FRANCE, "max_tokens": 1}
    raw = client.chat.completions.with_raw_response.create(
        **asked, store=True, reasoning_effort="low", verbosity="low", prompt_cache_key="k", top_p=0, stop=""
    )
    assert raw.headers["x-emberline-ignored"] == "prompt_cache_key, store, verbosity, reasoning_effort"
