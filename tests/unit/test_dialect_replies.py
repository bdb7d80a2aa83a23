"""Translation of replies and errors between all dialects, rule by rule."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from dialect_cases import DIALECTS, PAIRS, REPLIES, REQUESTS

from emberline.gateway import dialects
from emberline.gateway.core.errors import UpstreamBroken, UpstreamFailed
from emberline.gateway.dialects.translate import ReplyContext, read_reply_context, translate_error, translate_reply
from emberline.wire.deltas import ChatDialect
from emberline.wire.usage import Usage

ASKED = ReplyContext(created=1700000000, id="made-1")


def translate(reply: dict[str, Any], source: ChatDialect, target: ChatDialect) -> tuple[dict[str, Any], set[str]]:
    body, changed = translate_reply(json.dumps(reply).encode(), source, target, ASKED)
    return json.loads(body), {change.field for change in changed}


def with_changes(dialect: ChatDialect, **fields: Any) -> dict[str, Any]:
    """Return the reply with fields of its choice replaced."""
    reply = json.loads(json.dumps(REPLIES[dialect]))
    place = {"openai-chat": "choices", "gemini": "candidates"}.get(dialect)
    (reply[place][0] if place else reply).update(fields)
    return reply


def stop_of(reply: dict[str, Any], dialect: ChatDialect) -> str | None:
    match dialect:
        case "openai-chat":
            return reply["choices"][0]["finish_reason"]
        case "anthropic":
            return reply["stop_reason"]
        case "gemini":
            return reply["candidates"][0]["finishReason"]
        case "openai-responses":
            return (reply["incomplete_details"] or {}).get("reason")


STOPS: list[tuple[ChatDialect, dict[str, Any], tuple[str | None, ...]]] = [  # chat, responses, anthropic, gemini
    ("openai-chat", {"finish_reason": "length"}, ("length", "max_output_tokens", "max_tokens", "MAX_TOKENS")),
    ("openai-chat", {"finish_reason": "content_filter"}, ("content_filter", "content_filter", "refusal", "SAFETY")),
    ("openai-chat", {"finish_reason": "stop"}, ("tool_calls", None, "tool_use", "STOP")),  # the reply has tool calls
    ("anthropic", {"stop_reason": "end_turn"}, ("stop", None, "end_turn", "STOP")),
    ("anthropic", {"stop_reason": "max_tokens"}, ("length", "max_output_tokens", "max_tokens", "MAX_TOKENS")),
    ("anthropic", {"stop_reason": "refusal"}, ("content_filter", "content_filter", "refusal", "SAFETY")),
    ("anthropic", {"stop_reason": "pause_turn"}, ("stop", None, "pause_turn", "STOP")),
    (
        "anthropic",
        {"stop_reason": "model_context_window_exceeded"},
        ("length", "max_output_tokens", "model_context_window_exceeded", "MAX_TOKENS"),
    ),
    ("anthropic", {"stop_reason": "stop_sequence", "stop_sequence": "END"}, ("stop", None, "stop_sequence", "STOP")),
    ("gemini", {"finishReason": "MAX_TOKENS"}, ("length", "max_output_tokens", "max_tokens", "MAX_TOKENS")),
    ("gemini", {"finishReason": "RECITATION"}, ("content_filter", "content_filter", "refusal", "SAFETY")),
    ("gemini", {"finishReason": "STOP"}, ("tool_calls", None, "tool_use", "STOP")),
    (
        "openai-responses",
        {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
        ("length", "max_output_tokens", "max_tokens", "MAX_TOKENS"),
    ),
    (
        "openai-responses",
        {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
        ("content_filter", "content_filter", "refusal", "SAFETY"),
    ),
]


@pytest.mark.parametrize(("source", "fields", "row"), STOPS)
def test_finish_reasons_are_translated(
    source: ChatDialect, fields: dict[str, Any], row: tuple[str | None, ...]
) -> None:
    for target, want in zip(DIALECTS, row, strict=True):
        body, _ = translate(with_changes(source, **fields), source, target)
        assert stop_of(body, target) == want, target
        if target == "openai-responses":
            assert body["status"] == ("incomplete" if want else "completed")


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_usage_is_translated(source: ChatDialect, target: ChatDialect) -> None:
    """OpenAI's and Gemini's input includes cached tokens, Anthropic's does not; Gemini's output excludes reasoning."""
    body, changed = translate(REPLIES[source], source, target)
    assert Usage.find_in(target, body) == Usage(30, 10, 0, 20, 5) and not changed
    usage = body.get("usage") or body["usageMetadata"]
    first, last = {
        "openai-chat": ("prompt_tokens", "completion_tokens"),
        "openai-responses": ("input_tokens", "output_tokens"),
        "anthropic": ("input_tokens", "output_tokens"),
        "gemini": ("promptTokenCount", "candidatesTokenCount"),
    }[target]
    assert (usage[first], usage[last]) == ((20 if target == "anthropic" else 30), (15 if target == "gemini" else 20))


def test_refusals_are_translated() -> None:
    chat = with_changes(
        "openai-chat", message={"role": "assistant", "content": None, "refusal": "No."}, finish_reason="stop"
    )
    body, _ = translate(chat, "openai-chat", "anthropic")
    assert body["content"][0]["text"] == "No." and body["stop_reason"] == "refusal"
    body, _ = translate(chat, "openai-chat", "openai-responses")
    assert body["output"][0]["content"] == [{"type": "refusal", "refusal": "No."}] and body["status"] == "completed"
    body, _ = translate(chat, "openai-chat", "gemini")
    assert body["candidates"][0]["finishReason"] == "SAFETY"
    details = {"type": "refusal", "category": "cyber", "explanation": "Not this."}
    body, _ = translate(
        with_changes("anthropic", content=[], stop_reason="refusal", stop_details=details), "anthropic", "openai-chat"
    )
    assert body["choices"][0]["message"]["refusal"] == "Not this." and body["choices"][0]["message"]["content"] is None
    blocked = {"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 3}}
    body, _ = translate(blocked, "gemini", "openai-chat")
    assert stop_of(body, "openai-chat") == "content_filter" and "SAFETY" in body["choices"][0]["message"]["refusal"]


TOKENS = [
    {"token": "Hé", "logprob": -0.5, "bytes": [72, 195, 169], "top_logprobs": []},
    {"token": "!", "logprob": -1.5, "bytes": [33], "top_logprobs": [{"token": "?", "logprob": -2.0, "bytes": [63]}]},
]


def test_logprobs_are_translated() -> None:
    chat = with_changes("openai-chat", logprobs={"content": TOKENS, "refusal": None})
    body, _ = translate(chat, "openai-chat", "openai-responses")
    assert next(item for item in body["output"] if item["type"] == "message")["content"][0]["logprobs"] == TOKENS
    body, _ = translate(body, "openai-responses", "gemini")
    result = body["candidates"][0]["logprobsResult"]
    assert result["chosenCandidates"][0] == {"token": "Hé", "logProbability": -0.5}
    assert result["topCandidates"][1]["candidates"] == [{"token": "?", "logProbability": -2.0}]
    body, _ = translate(body, "gemini", "openai-chat")
    assert body["choices"][0]["logprobs"]["content"] == TOKENS


def test_several_choices_are_translated() -> None:
    reply = json.loads(json.dumps(REPLIES["openai-chat"]))
    reply["choices"].append({"index": 1, "message": {"role": "assistant", "content": "b"}, "finish_reason": "stop"})
    body, _ = translate(reply, "openai-chat", "gemini")
    assert [row["index"] for row in body["candidates"]] == [0, 1]
    assert body["candidates"][1]["content"]["parts"] == [{"text": "b"}]


def test_reasoning_of_mistral_and_groq_is_translated() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "so"}]
    body, changed = translate(
        with_changes("openai-chat", message={"role": "assistant", "content": parts}), "openai-chat", "anthropic"
    )
    assert [block["type"] for block in body["content"]] == ["thinking", "text"] and not changed
    groq = with_changes("openai-chat", message={"role": "assistant", "content": "so", "reasoning": "hm"})
    assert translate(groq, "openai-chat", "anthropic")[0]["content"][0]["thinking"] == "hm"


def test_dropped_fields_are_reported() -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    cited = {"type": "text", "text": "x", "citations": [{"type": "char_location"}]}
    body, changed = translate(with_changes("anthropic", content=[search, cited]), "anthropic", "openai-chat")
    assert changed == {"reply.server_tool_use", "reply.citations"} and body["choices"][0]["message"]["content"] == "x"
    grounded = with_changes("gemini", groundingMetadata={"webSearchQueries": ["x"]})
    assert translate(grounded, "gemini", "anthropic")[1] == {"reply.groundingMetadata.webSearchQueries"}


@pytest.mark.parametrize("source", DIALECTS)
@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"choices":5,"output":5,"content":5,"candidates":5}'])
def test_invalid_reply_raises_broken(source: ChatDialect, body: bytes) -> None:
    for target in DIALECTS:
        if target != source:
            with pytest.raises(UpstreamBroken):
                translate_reply(body, source, target, ASKED)


def test_reply_without_choices_raises_broken() -> None:
    for target in ("anthropic", "openai-responses"):
        with pytest.raises(UpstreamBroken):
            translate(with_changes("openai-chat") | {"choices": []}, "openai-chat", target)  # type: ignore[arg-type]
    with pytest.raises(UpstreamFailed, match="out of luck"):
        translate(
            with_changes("openai-responses", status="failed", error={"message": "out of luck"}),
            "openai-responses",
            "anthropic",
        )


ERRORS = {
    "openai": {
        "error": {"message": "no", "type": "invalid_request_error", "param": "x", "code": "context_length_exceeded"}
    },
    "anthropic": {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}},
    "gemini": {"error": {"code": 400, "message": "no", "status": "INVALID_ARGUMENT"}},
    "gemini's list": [{"error": {"code": 400, "message": "no", "status": "INVALID_ARGUMENT"}}],
    "others": {"detail": "no"},
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_errors_are_translated(error: Any) -> None:
    body = json.dumps(error).encode()
    chat = json.loads(translate_error(body, 400, "openai-chat"))["error"]
    assert (chat["message"], chat["type"]) == ("no", "invalid_request_error")
    assert json.loads(translate_error(body, 400, "anthropic")) == ERRORS["anthropic"]
    assert json.loads(translate_error(body, 400, "gemini")) == ERRORS["gemini"]


def test_error_code_is_kept() -> None:
    body = json.dumps(ERRORS["openai"]).encode()
    assert json.loads(translate_error(body, 400, "openai-responses"))["error"]["code"] == "context_length_exceeded"
    assert "Bad Gateway" in json.loads(translate_error(b"Bad Gateway", 502, "anthropic"))["error"]["message"]


def test_reply_repeats_fields_of_its_request() -> None:
    body = json.dumps(REQUESTS["openai-responses"]).encode()
    request = read_reply_context(body, "openai-responses", model="m", created=5, id="resp_9")
    made, _ = translate_reply(json.dumps(REPLIES["gemini"]).encode(), "gemini", "openai-responses", request)
    reply = json.loads(made)
    assert reply["instructions"] == "Be brief." and reply["tools"][0]["name"] == "weather" and reply["created_at"] == 5
    assert "input" not in reply and reply["model"] == "m"
    assert read_reply_context(json.dumps(REQUESTS["openai-chat"]).encode(), "openai-chat").include_usage
    assert not read_reply_context(b'{"stream":true}', "openai-chat").include_usage


def test_dialects_are_pure() -> None:
    """Dialects use no clock, no network and no randomness."""
    folder = Path(dialects.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        impure = names & {
            "time",
            "datetime",
            "asyncio",
            "aiohttp",
            "random",
            "secrets",
            "uuid",
            "socket",
            "os",
            "logging",
        }
        assert not impure, f"{path.name} imports {impure}"
