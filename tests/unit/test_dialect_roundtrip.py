"""Requests into their own dialect lose nothing; into another and back they keep what that one can carry."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from dialect_cases import DIALECTS, MODELS, PAIRS, REQUESTS
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.errors import InvalidRequest
from emberline.gateway.dialects.adapt import merged
from emberline.gateway.dialects.inner import Conversation, Image, Spoken, Text, ToolCall, ToolResult
from emberline.gateway.dialects.translate import GRAMMARS, Recipient, translate_request

Drawn = dict[str, Any]
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
jsons = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(words, jsons, max_size=3)
temperatures = st.floats(0, 1) | st.integers(0, 1)


def some(required: Drawn, optional: Drawn | None = None, *, nulls: bool = True) -> st.SearchStrategy[Drawn]:
    """An object with these fields, of which the optional may be missing, or null."""
    always = {k: v if isinstance(v, st.SearchStrategy) else st.just(v) for k, v in required.items()}
    maybe = {name: st.none() | value if nulls else value for name, value in (optional or {}).items()}
    return st.fixed_dictionaries(always, optional=maybe)


schemas = st.just({"type": "object", "properties": {"a": {"type": "string"}}}) | st.just({"type": "object"})
calls_text = objects.map(lambda value: json.dumps(value))

chat_text = some({"type": "text", "text": words}, {"prompt_cache_breakpoint": some({"mode": "explicit"})})
chat_image = some(
    {
        "type": "image_url",
        "image_url": some(
            {"url": st.sampled_from(["https://x/y.png", "data:image/png;base64,AAAA"])},
            {"detail": st.just("low"), "new": jsons},
        ),
    }
)
chat_file = some(
    {
        "type": "file",
        "file": some(
            {}, {"file_data": st.just("data:application/pdf;base64,AAAA"), "filename": words, "file_id": names}
        ),
    }
)
chat_audio = some(
    {"type": "input_audio", "input_audio": some({"data": "AAAA", "format": st.sampled_from(["wav", "mp3"])})}
)
chat_call = some({"id": names, "type": "function", "function": some({"name": names, "arguments": calls_text | words})})
chat_messages = st.one_of(
    some(
        {
            "role": st.sampled_from(["system", "developer"]),
            "content": words | st.lists(chat_text, min_size=1, max_size=2),
        },
        {"name": names},
    ),
    some(
        {
            "role": "user",
            "content": st.just("") | words | st.lists(chat_text | chat_image | chat_file | chat_audio, max_size=3),
        },
        {"name": names},
    ),
    some(
        {"role": "assistant"},
        {
            "content": words | st.lists(chat_text, max_size=2),
            "refusal": words,
            "reasoning_content": words,
            "reasoning": words,
            "tool_calls": st.lists(chat_call, max_size=2),
            "audio": some({"id": names}),
        },
    ),
    some({"role": "tool", "tool_call_id": names, "content": words | st.lists(chat_text, max_size=2)}),
)
chat_tool = some(
    {
        "type": "function",
        "function": some({"name": names}, {"description": words, "parameters": schemas, "strict": st.booleans()}),
    }
)
chat_requests = some(
    {"model": "m", "messages": st.lists(chat_messages, max_size=4)},
    {
        "tools": st.lists(chat_tool | some({"type": "custom", "custom": some({"name": names})}), max_size=2),
        "tool_choice": st.sampled_from(["auto", "none", "required"])
        | some({"type": "function", "function": some({"name": names})})
        | some(
            {
                "type": "allowed_tools",
                "allowed_tools": some(
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
        "stream_options": some({}, {"include_usage": st.booleans(), "include_obfuscation": st.booleans()}),
        "reasoning_effort": st.sampled_from(["none", "low", "max"]),
        "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}])
        | some(
            {"type": "json_schema", "json_schema": some({"name": names, "schema": schemas}, {"strict": st.booleans()})}
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

cache = some({"type": "ephemeral"}, {"ttl": st.just("1h")})
a_text = some({"type": "text", "text": words}, {"cache_control": cache, "citations": st.lists(objects, max_size=1)})
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
a_image = some({"type": "image", "source": sources}, {"cache_control": cache})
a_document = some({"type": "document", "source": documents}, {"title": words, "context": words})
a_blocks = st.one_of(
    a_text,
    a_image,
    a_document,
    some({"type": "thinking", "thinking": words, "signature": words}),
    some({"type": "redacted_thinking", "data": words}),
    some({"type": "tool_use", "id": names, "name": names, "input": objects}, {"cache_control": cache}),
    some(
        {"type": "tool_result", "tool_use_id": names},
        {"content": words | st.lists(a_text | a_image, max_size=2), "is_error": st.booleans(), "cache_control": cache},
    ),
    some({"type": "server_tool_use", "id": names, "name": "web_search", "input": objects}),
)
a_tool = some(
    {"name": names, "input_schema": schemas},
    {"description": words, "strict": st.booleans(), "cache_control": cache, "type": st.just("custom")},
)
anthropic_requests = some(
    {
        "model": "m",
        "max_tokens": st.integers(1, 99),
        "messages": st.lists(
            some(
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
        "tools": st.lists(a_tool | some({"type": "web_search_20250305", "name": "web_search"}), max_size=2),
        "tool_choice": some(
            {"type": st.sampled_from(["auto", "any", "none"])}, {"disable_parallel_tool_use": st.booleans()}
        )
        | some({"type": "tool", "name": names}),
        "thinking": st.sampled_from(
            [
                {"type": "disabled"},
                {"type": "adaptive", "display": "omitted"},
                {"type": "enabled", "budget_tokens": 1024},
                {"type": "between_tools"},
            ]
        ),
        "output_config": some(
            {}, {"effort": st.just("high"), "format": some({"type": "json_schema", "schema": schemas}), "new": jsons}
        ),
        "metadata": some({}, {"user_id": words, "else": jsons}),
        "temperature": temperatures,
        "top_k": st.integers(0, 9),
        "stop_sequences": st.lists(words, max_size=2),
        "stream": st.booleans(),
        "container": words,
        "cache_control": cache,
    },
)

r_input = st.one_of(
    some({"type": "input_text", "text": words}, {"prompt_cache_breakpoint": some({"mode": "explicit"})}),
    some({"type": "input_image", "image_url": st.just("https://x/y.png")}, {"detail": st.just("low")}),
    some({"type": "input_image", "file_id": "f1", "detail": "auto"}),
    some({"type": "input_file", "file_url": "https://x/y.pdf", "filename": words}),
)
r_output = some(
    {"type": "output_text", "text": words, "annotations": st.lists(objects, max_size=1)}, {"logprobs": st.just([])}
)
status = st.sampled_from(["completed", "incomplete"])
r_items = st.one_of(
    some(
        {"role": st.sampled_from(["user", "system", "developer"]), "content": words | st.lists(r_input, max_size=3)},
        {"type": st.just("message")},
    ),
    some(
        {
            "type": "message",
            "role": "assistant",
            "id": names,
            "status": status,
            "content": st.lists(r_output | some({"type": "refusal", "refusal": words}), max_size=2),
        },
        {"phase": st.just("commentary")},
    ),
    some(
        {
            "type": "reasoning",
            "id": names,
            "summary": st.lists(some({"type": "summary_text", "text": words}), max_size=2),
        },
        {
            "encrypted_content": words,
            "status": status,
            "content": st.lists(some({"type": "reasoning_text", "text": words}), max_size=1),
        },
    ),
    some(
        {"type": "function_call", "call_id": names, "name": names, "arguments": calls_text},
        {"id": names, "status": status},
    ),
    some(
        {"type": "function_call_output", "call_id": names, "output": words | st.lists(r_input, max_size=2)},
        {"id": names},
    ),
    some({"type": "web_search_call", "id": names, "status": status}),
    some({"type": "item_reference", "id": names}),
)
responses_requests = some(
    {"model": "m", "input": words | st.lists(r_items, max_size=4)},
    {
        "instructions": words,
        "tools": st.lists(
            some(
                {"type": "function", "name": names, "parameters": schemas, "strict": st.booleans()},
                {"description": words},
            )
            | some({"type": "web_search"}),
            max_size=2,
        ),
        "tool_choice": st.sampled_from(["auto", "none", "required"]) | some({"type": "function", "name": names}),
        "text": some(
            {},
            {
                "verbosity": st.just("low"),
                "format": st.just({"type": "text"}) | some({"type": "json_schema", "name": names, "schema": schemas}),
            },
        ),
        "reasoning": some({}, {"effort": st.just("low"), "summary": st.just("auto"), "context": st.just("auto")}),
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

plain = functools.partial(some, nulls=False)  # Gemini's JSON has no nulls
camels = st.dictionaries(st.from_regex(r"[a-z][A-Za-z0-9]{0,8}", fullmatch=True), words, max_size=3)  # its own names
g_parts = st.one_of(
    plain({"text": words}, {"thoughtSignature": st.just("AAAA")}),
    plain({"text": words, "thought": True}, {"thoughtSignature": st.just("AAAA")}),
    plain(
        {
            "inlineData": plain(
                {"mimeType": st.sampled_from(["image/png", "audio/wav", "application/pdf"]), "data": "AAAA"}
            )
        },
        {"videoMetadata": camels},
    ),
    plain({"fileData": plain({"fileUri": "gs://x/y"}, {"mimeType": st.just("image/png"), "displayName": words})}),
    plain(
        {"functionCall": plain({"name": names, "args": objects}, {"id": names})}, {"thoughtSignature": st.just("AAAA")}
    ),
    plain(
        {
            "functionResponse": plain(  # of no call here: else it would get that one's id
                {
                    "name": names.map("R{}".format),
                    "response": objects | plain({"output": words}) | plain({"error": words}),
                },
                {"id": names},
            )
        }
    ),
    plain({"executableCode": plain({"language": "PYTHON", "code": words})}),
)
gemini_requests = plain(
    {
        "contents": st.lists(
            plain({"parts": st.lists(g_parts, max_size=3)})
            | plain({"role": st.sampled_from(["user", "model"]), "parts": st.lists(g_parts, max_size=3)}),
            max_size=4,
        )
    },
    {
        "systemInstruction": plain({"parts": st.lists(plain({"text": words}), max_size=2)}),
        "tools": st.just(
            [
                {"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT", "nullable": True}}]},
                {"googleSearch": {}},
            ]
        ),
        "toolConfig": st.sampled_from(["AUTO", "ANY", "NONE", "VALIDATED"]).map(
            lambda mode: {"functionCallingConfig": {"mode": mode}}
        ),
        "generationConfig": plain(
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
DRAWN: dict[Spoken, st.SearchStrategy[Drawn]] = {
    "openai-chat": chat_requests,
    "openai-responses": responses_requests,
    "anthropic": anthropic_requests,
    "gemini": gemini_requests,
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_same_dialect_loses_nothing(dialect: Spoken) -> None:
    @given(DRAWN[dialect])
    @settings(max_examples=60, deadline=None)
    def check(request: Drawn) -> None:
        body, changed = translate_request(
            json.dumps(request).encode(), dialect, dialect, Recipient(request.get("model", ""))
        )
        assert json.loads(body) == request and not changed

    check()


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_what_is_valid_becomes_something_valid(source: Spoken, target: Spoken) -> None:
    """Any request translates or is refused with its reason; what comes out is understood by the other's parser."""

    @given(DRAWN[source])
    @settings(max_examples=12, deadline=None)
    def check(request: Drawn) -> None:
        try:
            body, _ = translate_request(json.dumps(request).encode(), source, target, Recipient(MODELS[target]))
        except InvalidRequest as error:
            assert error.param
            return
        GRAMMARS[target].parse(json.loads(body))

    check()


def test_the_cases_themselves() -> None:
    for dialect, request in REQUESTS.items():
        body, _ = translate_request(json.dumps(request).encode(), dialect, dialect, Recipient(request.get("model", "")))
        assert json.loads(body) == request


def test_thinking_by_its_other_name() -> None:
    said = {"role": "assistant", "content": "so", "reasoning": "hm"}
    request = {"model": "m", "messages": [said]}
    body, _ = translate_request(json.dumps(request).encode(), "openai-chat", "openai-chat", Recipient("m"))
    assert json.loads(body) == request


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    rows = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    return [path] * bool(path) + [place for name, inner in rows for place in places(inner, (*path, name))]


@given(st.sampled_from(PAIRS), st.data())
@settings(max_examples=150, deadline=None)
def test_anything_anywhere_is_translated_or_refused(pair: tuple[Spoken, Spoken], draw: st.DataObject) -> None:
    """A request with one thing in it replaced by any other: no other fault than InvalidRequest."""
    source, target = pair
    request = json.loads(json.dumps(REQUESTS[source]))
    *outer, name = draw.draw(st.sampled_from(places(request)))
    place = request
    for step in outer:
        place = place[step]
    place[name] = draw.draw(jsons)
    try:
        translate_request(json.dumps(request).encode(), source, target, Recipient(MODELS[target]))
    except InvalidRequest as error:
        assert error.param


plain_turns = st.lists(
    st.tuples(
        st.lists(words, min_size=1, max_size=2),  # what the user says
        st.booleans(),  # with a picture
        words | st.none(),  # what is answered
        st.lists(st.tuples(names, objects, words), max_size=3),  # what is called, and its result
    ),
    min_size=1,
    max_size=3,
)


def conversation(system: str, turns: list[Any]) -> Drawn:
    """In chat's words; each turn ends with the user's, so that neighbours never merge by themselves."""
    messages: list[Any] = [{"role": "system", "content": system}]
    number = 0
    for texts, picture, answer, calls in turns:
        parts: list[Any] = [{"type": "text", "text": text} for text in texts]
        if picture:
            parts.append({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
        messages.append({"role": "user", "content": parts})
        said: Drawn = {"role": "assistant", "content": answer or "ok"}
        if calls:
            said["tool_calls"] = [
                {
                    "id": f"call_{number + at}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(args)},
                }
                for at, (name, args, _) in enumerate(calls)
            ]
        messages.append(said)
        for at, (_, _, result) in enumerate(calls):
            messages.append({"role": "tool", "tool_call_id": f"call_{number + at}", "content": result})
        number += len(calls)
    messages.append({"role": "user", "content": "so?"})
    return {"model": "m", "messages": messages, "max_completion_tokens": 5000, "stream": False}


def told(asked: Conversation) -> list[Any]:
    """What a conversation says, whoever says it how."""
    rows: list[Any] = [("system", part.text) for part in asked.system if isinstance(part, Text)]
    calls: dict[str, int] = {}
    for message in merged(asked.messages, roles=("user", "assistant")):
        for part in message.parts:
            match part:
                case Text():
                    rows.append((message.role, part.text))
                case Image():
                    rows.append((message.role, part.mime, part.data))
                case ToolCall():
                    calls[part.id] = len(calls)
                    rows.append(("call", calls[part.id], part.name, json.loads(part.arguments)))
                case ToolResult():
                    text = "\n".join(inner.text for inner in part.parts if isinstance(inner, Text))
                    rows.append(("result", calls[part.id], text))
    return rows


@pytest.mark.parametrize("via", DIALECTS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_there_and_back(dialect: Spoken, via: Spoken) -> None:
    """Texts, pictures, calls and results survive every dialect; ids are their own only where there are ids."""

    @given(words, plain_turns)
    @settings(max_examples=8, deadline=None)
    def check(system: str, turns: list[Any]) -> None:
        first = json.dumps(conversation(system, turns)).encode()
        if dialect != "openai-chat":
            first, _ = translate_request(first, "openai-chat", dialect, Recipient("m"))
        there, _ = translate_request(first, dialect, via, Recipient("m"))
        back, _ = translate_request(there, via, dialect, Recipient("m"))
        want = told(GRAMMARS[dialect].parse(json.loads(first)))
        assert told(GRAMMARS[via].parse(json.loads(there))) == want
        assert told(GRAMMARS[dialect].parse(json.loads(back))) == want

    check()
