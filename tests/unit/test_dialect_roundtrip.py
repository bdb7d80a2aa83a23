"""Round trips of requests within a wire format and through another one."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from dialect_cases import DIALECTS, MODELS, PAIRS, REQUESTS
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.errors import InvalidRequest
from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.adapt import merge_adjacent_messages
from emberline.gateway.dialects.translate import CODECS, TargetModel, translate_request
from emberline.wire.deltas import ChatDialect

JsonObject = dict[str, Any]
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
jsons = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(words, jsons, max_size=3)
temperatures = st.floats(0, 1) | st.integers(0, 1)


def json_objects(
    required: JsonObject, optional: JsonObject | None = None, *, nulls: bool = True
) -> st.SearchStrategy[JsonObject]:
    """Return a strategy for objects with these fields; optional ones may be missing or null."""
    always = {k: v if isinstance(v, st.SearchStrategy) else st.just(v) for k, v in required.items()}
    maybe = {name: st.none() | value if nulls else value for name, value in (optional or {}).items()}
    return st.fixed_dictionaries(always, optional=maybe)


schemas = st.just({"type": "object", "properties": {"a": {"type": "string"}}}) | st.just({"type": "object"})
calls_text = objects.map(lambda value: json.dumps(value))

chat_text = json_objects(
    {"type": "text", "text": words}, {"prompt_cache_breakpoint": json_objects({"mode": "explicit"})}
)
chat_image = json_objects(
    {
        "type": "image_url",
        "image_url": json_objects(
            {"url": st.sampled_from(["https://x/y.png", "data:image/png;base64,AAAA"])},
            {"detail": st.just("low"), "new": jsons},
        ),
    }
)
chat_file = json_objects(
    {
        "type": "file",
        "file": json_objects(
            {}, {"file_data": st.just("data:application/pdf;base64,AAAA"), "filename": words, "file_id": names}
        ),
    }
)
chat_audio = json_objects(
    {"type": "input_audio", "input_audio": json_objects({"data": "AAAA", "format": st.sampled_from(["wav", "mp3"])})}
)
chat_call = json_objects(
    {"id": names, "type": "function", "function": json_objects({"name": names, "arguments": calls_text | words})}
)
chat_messages = st.one_of(
    json_objects(
        {
            "role": st.sampled_from(["system", "developer"]),
            "content": words | st.lists(chat_text, min_size=1, max_size=2),
        },
        {"name": names},
    ),
    json_objects(
        {
            "role": "user",
            "content": st.just("") | words | st.lists(chat_text | chat_image | chat_file | chat_audio, max_size=3),
        },
        {"name": names},
    ),
    json_objects(
        {"role": "assistant"},
        {
            "content": words | st.lists(chat_text, max_size=2),
            "refusal": words,
            "reasoning_content": words,
            "reasoning": words,
            "tool_calls": st.lists(chat_call, max_size=2),
            "audio": json_objects({"id": names}),
        },
    ),
    json_objects({"role": "tool", "tool_call_id": names, "content": words | st.lists(chat_text, max_size=2)}),
)
chat_tool = json_objects(
    {
        "type": "function",
        "function": json_objects(
            {"name": names}, {"description": words, "parameters": schemas, "strict": st.booleans()}
        ),
    }
)
chat_requests = json_objects(
    {"model": "m", "messages": st.lists(chat_messages, max_size=4)},
    {
        "tools": st.lists(
            chat_tool | json_objects({"type": "custom", "custom": json_objects({"name": names})}), max_size=2
        ),
        "tool_choice": st.sampled_from(["auto", "none", "required"])
        | json_objects({"type": "function", "function": json_objects({"name": names})})
        | json_objects(
            {
                "type": "allowed_tools",
                "allowed_tools": json_objects(
                    {"mode": "auto", "tools": st.just([{"type": "function", "function": {"name": "f"}}])}
                ),
            }
        ),
        "max_tokens": st.integers(1, 9),
        "max_completion_tokens": st.integers(1, 9),
        "temperature": temperatures,
        "top_p": temperatures,
        "n": st.integers(1, 3),
        "seed": st.integers(),
        "stop": words | st.lists(words, max_size=2),
        "logprobs": st.booleans(),
        "top_logprobs": st.integers(0, 3),
        "stream": st.booleans(),
        "stream_options": json_objects({}, {"include_usage": st.booleans(), "include_obfuscation": st.booleans()}),
        "reasoning_effort": st.sampled_from(["none", "low", "max"]),
        "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}])
        | json_objects(
            {
                "type": "json_schema",
                "json_schema": json_objects({"name": names, "schema": schemas}, {"strict": st.booleans()}),
            }
        ),
        "parallel_tool_calls": st.booleans(),
        "user": words,
        "metadata": st.dictionaries(names, words, max_size=2),
        "logit_bias": st.dictionaries(names, st.integers(), max_size=2),
        "functions": st.just([{"name": "f"}]),
        "verbosity": st.just("low"),
        "whatever": jsons,
    },
)

cache = json_objects({"type": "ephemeral"}, {"ttl": st.just("1h")})
a_text = json_objects(
    {"type": "text", "text": words}, {"cache_control": cache, "citations": st.lists(objects, max_size=1)}
)
sources = st.sampled_from(
    [
        {"type": "base64", "media_type": "image/png", "data": "AAAA"},
        {"type": "url", "url": "https://x/y.png", "new": 1},
        {"type": "url", "url": "https://x/y.png"},
        {"type": "file", "file_id": "f1"},
    ]
)
documents = (
    sources
    | st.just({"type": "text", "media_type": "text/plain", "data": "hi"})
    | st.just({"type": "content", "content": "x"})
)
a_image = json_objects({"type": "image", "source": sources}, {"cache_control": cache})
a_document = json_objects({"type": "document", "source": documents}, {"title": words, "context": words})
a_blocks = st.one_of(
    a_text,
    a_image,
    a_document,
    json_objects({"type": "thinking", "thinking": words, "signature": words}),
    json_objects({"type": "redacted_thinking", "data": words}),
    json_objects({"type": "tool_use", "id": names, "name": names, "input": objects}, {"cache_control": cache}),
    json_objects(
        {"type": "tool_result", "tool_use_id": names},
        {"content": words | st.lists(a_text | a_image, max_size=2), "is_error": st.booleans(), "cache_control": cache},
    ),
    json_objects({"type": "server_tool_use", "id": names, "name": "web_search", "input": objects}),
)
a_tool = json_objects(
    {"name": names, "input_schema": schemas},
    {"description": words, "strict": st.booleans(), "cache_control": cache, "type": st.just("custom")},
)
anthropic_requests = json_objects(
    {
        "model": "m",
        "max_tokens": st.integers(1, 99),
        "messages": st.lists(
            json_objects(
                {
                    "role": st.sampled_from(["user", "assistant", "system"]),
                    "content": words | st.lists(a_blocks, max_size=3),
                }
            ),
            max_size=4,
        ),
    },
    {
        "system": words | st.lists(a_text, max_size=2),
        "tools": st.lists(a_tool | json_objects({"type": "web_search_20250305", "name": "web_search"}), max_size=2),
        "tool_choice": json_objects(
            {"type": st.sampled_from(["auto", "any", "none"])}, {"disable_parallel_tool_use": st.booleans()}
        )
        | json_objects({"type": "tool", "name": names}),
        "thinking": st.sampled_from(
            [
                {"type": "disabled"},
                {"type": "adaptive", "display": "omitted"},
                {"type": "enabled", "budget_tokens": 1024},
                {"type": "between_tools"},
            ]
        ),
        "output_config": json_objects(
            {},
            {
                "effort": st.just("high"),
                "format": json_objects({"type": "json_schema", "schema": schemas}),
                "new": jsons,
            },
        ),
        "metadata": json_objects({}, {"user_id": words, "else": jsons}),
        "temperature": temperatures,
        "top_k": st.integers(0, 9),
        "stop_sequences": st.lists(words, max_size=2),
        "stream": st.booleans(),
        "container": words,
        "cache_control": cache,
    },
)

r_input = st.one_of(
    json_objects(
        {"type": "input_text", "text": words}, {"prompt_cache_breakpoint": json_objects({"mode": "explicit"})}
    ),
    json_objects({"type": "input_image", "image_url": st.just("https://x/y.png")}, {"detail": st.just("low")}),
    json_objects({"type": "input_image", "file_id": "f1", "detail": "auto"}),
    json_objects({"type": "input_file", "file_url": "https://x/y.pdf", "filename": words}),
)
r_output = json_objects(
    {"type": "output_text", "text": words, "annotations": st.lists(objects, max_size=1)}, {"logprobs": st.just([])}
)
status = st.sampled_from(["completed", "incomplete"])
r_items = st.one_of(
    json_objects(
        {"role": st.sampled_from(["user", "system", "developer"]), "content": words | st.lists(r_input, max_size=3)},
        {"type": st.just("message")},
    ),
    json_objects(
        {
            "type": "message",
            "role": "assistant",
            "id": names,
            "status": status,
            "content": st.lists(r_output | json_objects({"type": "refusal", "refusal": words}), max_size=2),
        },
        {"phase": st.just("commentary")},
    ),
    json_objects(
        {
            "type": "reasoning",
            "id": names,
            "summary": st.lists(json_objects({"type": "summary_text", "text": words}), max_size=2),
        },
        {
            "encrypted_content": words,
            "status": status,
            "content": st.lists(json_objects({"type": "reasoning_text", "text": words}), max_size=1),
        },
    ),
    json_objects(
        {"type": "function_call", "call_id": names, "name": names, "arguments": calls_text},
        {"id": names, "status": status},
    ),
    json_objects(
        {"type": "function_call_output", "call_id": names, "output": words | st.lists(r_input, max_size=2)},
        {"id": names},
    ),
    json_objects({"type": "web_search_call", "id": names, "status": status}),
    json_objects({"type": "item_reference", "id": names}),
)
responses_requests = json_objects(
    {"model": "m", "input": words | st.lists(r_items, max_size=4)},
    {
        "instructions": words,
        "tools": st.lists(
            json_objects(
                {"type": "function", "name": names, "parameters": schemas, "strict": st.booleans()},
                {"description": words},
            )
            | json_objects({"type": "web_search"}),
            max_size=2,
        ),
        "tool_choice": st.sampled_from(["auto", "none", "required"])
        | json_objects({"type": "function", "name": names}),
        "text": json_objects(
            {},
            {
                "verbosity": st.just("low"),
                "format": st.just({"type": "text"})
                | json_objects({"type": "json_schema", "name": names, "schema": schemas}),
            },
        ),
        "reasoning": json_objects(
            {}, {"effort": st.just("low"), "summary": st.just("auto"), "context": st.just("auto")}
        ),
        "include": st.lists(
            st.sampled_from(["reasoning.encrypted_content", "message.output_text.logprobs", "x.y"]), unique=True
        ),
        "top_logprobs": st.integers(0, 3),
        "max_output_tokens": st.integers(1, 9),
        "store": st.booleans(),
        "stream": st.booleans(),
        "previous_response_id": names,
        "parallel_tool_calls": st.booleans(),
        "metadata": st.dictionaries(names, words, max_size=2),
        "prompt_cache_key": words,
    },
)

json_objects_without_null = functools.partial(json_objects, nulls=False)  # Gemini's JSON has no nulls
camels = st.dictionaries(st.from_regex(r"[a-z][A-Za-z0-9]{0,8}", fullmatch=True), words, max_size=3)  # its own names
g_parts = st.one_of(
    json_objects_without_null({"text": words}, {"thoughtSignature": st.just("AAAA")}),
    json_objects_without_null({"text": words, "thought": True}, {"thoughtSignature": st.just("AAAA")}),
    json_objects_without_null(
        {
            "inlineData": json_objects_without_null(
                {"mimeType": st.sampled_from(["image/png", "audio/wav", "application/pdf"]), "data": "AAAA"}
            )
        },
        {"videoMetadata": camels},
    ),
    json_objects_without_null(
        {
            "fileData": json_objects_without_null(
                {"fileUri": "gs://x/y"}, {"mimeType": st.just("image/png"), "displayName": words}
            )
        }
    ),
    json_objects_without_null(
        {"functionCall": json_objects_without_null({"name": names, "args": objects}, {"id": names})},
        {"thoughtSignature": st.just("AAAA")},
    ),
    json_objects_without_null(
        {
            "functionResponse": json_objects_without_null(  # no call has its name: that would give it an id
                {
                    "name": names.map("R{}".format),
                    "response": objects
                    | json_objects_without_null({"output": words})
                    | json_objects_without_null({"error": words}),
                },
                {"id": names},
            )
        }
    ),
    json_objects_without_null({"executableCode": json_objects_without_null({"language": "PYTHON", "code": words})}),
)
gemini_requests = json_objects_without_null(
    {
        "contents": st.lists(
            json_objects_without_null({"parts": st.lists(g_parts, max_size=3)})
            | json_objects_without_null(
                {"role": st.sampled_from(["user", "model"]), "parts": st.lists(g_parts, max_size=3)}
            ),
            max_size=4,
        )
    },
    {
        "systemInstruction": json_objects_without_null(
            {"parts": st.lists(json_objects_without_null({"text": words}), max_size=2)}
        ),
        "tools": st.just(
            [
                {"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT", "nullable": True}}]},
                {"googleSearch": {}},
            ]
        ),
        "toolConfig": st.sampled_from(["AUTO", "ANY", "NONE", "VALIDATED"]).map(
            lambda mode: {"functionCallingConfig": {"mode": mode}}
        ),
        "generationConfig": json_objects_without_null(
            {},
            {
                "maxOutputTokens": st.integers(1, 9),
                "topK": st.integers(1, 9) | st.just(4.0),
                "temperature": temperatures,
                "candidateCount": st.integers(1, 2),
                "responseMimeType": st.sampled_from(["application/json", "text/plain", "text/x.enum"]),
                "responseSchema": st.just({"type": "STRING"}),
                "thinkingConfig": st.just({"thinkingBudget": -1})
                | st.just({"thinkingLevel": "LOW", "includeThoughts": True}),
                "responseLogprobs": st.booleans(),
                "speechConfig": camels,
            },
        ),
        "safetySettings": st.lists(camels, max_size=1),
        "cachedContent": words,
    },
)
REQUEST_STRATEGIES: dict[ChatDialect, st.SearchStrategy[JsonObject]] = {
    "openai-chat": chat_requests,
    "openai-responses": responses_requests,
    "anthropic": anthropic_requests,
    "gemini": gemini_requests,
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_same_format_loses_nothing(dialect: ChatDialect) -> None:
    @given(REQUEST_STRATEGIES[dialect])
    @settings(max_examples=60, deadline=None)
    def check(request: JsonObject) -> None:
        body, changed = translate_request(
            json.dumps(request).encode(), dialect, dialect, TargetModel(request.get("model", ""))
        )
        assert json.loads(body) == request and not changed

    check()


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_valid_request_translates_to_valid_request(source: ChatDialect, target: ChatDialect) -> None:
    """Any valid request is rejected with a reason, or becomes one that the target's parser accepts."""

    @given(REQUEST_STRATEGIES[source])
    @settings(max_examples=12, deadline=None)
    def check(request: JsonObject) -> None:
        try:
            body, _ = translate_request(json.dumps(request).encode(), source, target, TargetModel(MODELS[target]))
        except InvalidRequest as error:
            assert error.param
            return
        CODECS[target].parse_request(json.loads(body))

    check()


def test_example_requests_survive_same_format() -> None:
    for dialect, request in REQUESTS.items():
        body, _ = translate_request(
            json.dumps(request).encode(), dialect, dialect, TargetModel(request.get("model", ""))
        )
        assert json.loads(body) == request


def test_reasoning_field_is_kept() -> None:
    message = {"role": "assistant", "content": "so", "reasoning": "hm"}
    request = {"model": "m", "messages": [message]}
    body, _ = translate_request(json.dumps(request).encode(), "openai-chat", "openai-chat", TargetModel("m"))
    assert json.loads(body) == request


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    rows = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    return [path] * bool(path) + [place for name, inner in rows for place in paths(inner, (*path, name))]


@given(st.sampled_from(PAIRS), st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_request_is_translated_or_rejected(pair: tuple[ChatDialect, ChatDialect], draw: st.DataObject) -> None:
    """A request with one value replaced by another raises nothing but InvalidRequest."""
    source, target = pair
    request = json.loads(json.dumps(REQUESTS[source]))
    *outer, name = draw.draw(st.sampled_from(paths(request)))
    place = request
    for step in outer:
        place = place[step]
    place[name] = draw.draw(jsons)
    try:
        translate_request(json.dumps(request).encode(), source, target, TargetModel(MODELS[target]))
    except InvalidRequest as error:
        assert error.param


plain_turns = st.lists(
    st.tuples(
        st.lists(words, min_size=1, max_size=2),  # texts of the user
        st.booleans(),  # whether there is an image
        words | st.none(),  # the assistant's text
        st.lists(st.tuples(names, objects, words), max_size=3),  # tool calls: name, arguments, result
    ),
    min_size=1,
    max_size=3,
)


def conversation(system: str, turns: list[Any]) -> JsonObject:
    """Return a chat request in which no adjacent messages have the same role."""
    messages: list[Any] = [{"role": "system", "content": system}]
    number = 0
    for texts, picture, answer, calls in turns:
        parts: list[Any] = [{"type": "text", "text": text} for text in texts]
        if picture:
            parts.append({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
        messages.append({"role": "user", "content": parts})
        message: JsonObject = {"role": "assistant", "content": answer or "ok"}
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{number + at}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(args)},
                }
                for at, (name, args, _) in enumerate(calls)
            ]
        messages.append(message)
        for at, (_, _, result) in enumerate(calls):
            messages.append({"role": "tool", "tool_call_id": f"call_{number + at}", "content": result})
        number += len(calls)
    messages.append({"role": "user", "content": "so?"})
    return {"model": "m", "messages": messages, "max_completion_tokens": 5000, "stream": False}


def content_of(request: canonical.CanonicalRequest) -> list[Any]:
    """Return the content of a canonical request in a form that is equal for all wire formats."""
    rows: list[Any] = [("system", part.text) for part in request.system if isinstance(part, canonical.TextContent)]
    calls: dict[str, int] = {}
    for message in merge_adjacent_messages(request.messages, roles=("user", "assistant")):
        for part in message.parts:
            match part:
                case canonical.TextContent():
                    rows.append((message.role, part.text))
                case canonical.ImageContent():
                    rows.append((message.role, part.mime, part.data))
                case canonical.ToolCallContent():
                    calls[part.id] = len(calls)
                    rows.append(("call", calls[part.id], part.name, json.loads(part.arguments)))
                case canonical.ToolResultContent():
                    text = "\n".join(inner.text for inner in part.parts if isinstance(inner, canonical.TextContent))
                    rows.append(("result", calls[part.id], text))
    return rows


@pytest.mark.parametrize("via", DIALECTS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_conversation_survives_round_trip(dialect: ChatDialect, via: ChatDialect) -> None:
    """Texts, images, calls and results survive every wire format; ids only where the format has ids."""

    @given(words, plain_turns)
    @settings(max_examples=8, deadline=None)
    def check(system: str, turns: list[Any]) -> None:
        first = json.dumps(conversation(system, turns)).encode()
        if dialect != "openai-chat":
            first, _ = translate_request(first, "openai-chat", dialect, TargetModel("m"))
        there, _ = translate_request(first, dialect, via, TargetModel("m"))
        back, _ = translate_request(there, via, dialect, TargetModel("m"))
        want = content_of(CODECS[dialect].parse_request(json.loads(first)))
        assert content_of(CODECS[via].parse_request(json.loads(there))) == want
        assert content_of(CODECS[dialect].parse_request(json.loads(back))) == want

    check()
