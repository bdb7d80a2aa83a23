"""Error replies in the format of each protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emberline.core import errors
from emberline.wire.errors import render_anthropic_error, render_openai_error


def all_errors() -> Iterator[type[errors.EmberlineError]]:
    todo: list[type[errors.EmberlineError]] = [errors.EmberlineError]
    while todo:
        kind = todo.pop()
        yield kind
        todo += kind.__subclasses__()


@pytest.mark.parametrize("kind", [*all_errors()])
def test_every_error_has_its_status_and_code(kind: type[errors.EmberlineError]) -> None:
    error = kind("what went wrong", hint="what to do")
    reply = render_openai_error(error)
    assert reply.status == kind.status
    assert reply.body["error"]["code"] == kind.code
    assert reply.body["error"]["message"] == "what went wrong (hint: what to do)"
    assert render_anthropic_error(error).status == kind.status
    assert render_anthropic_error(error).body["error"]["message"] == "what went wrong (hint: what to do)"


TYPES = [
    (errors.InvalidRequest, "invalid_request_error", "invalid_request_error"),
    (errors.ContextLengthExceeded, "invalid_request_error", "invalid_request_error"),
    (errors.BodyTooLarge, "invalid_request_error", "request_too_large"),
    (errors.Unauthorized, "authentication_error", "authentication_error"),
    (errors.ModelNotFound, "invalid_request_error", "not_found_error"),
    (errors.MethodNotAllowed, "invalid_request_error", "invalid_request_error"),
    (errors.Overloaded, "rate_limit_error", "rate_limit_error"),
    (errors.EngineUnavailable, "service_unavailable_error", "overloaded_error"),
    (errors.EngineFailed, "server_error", "api_error"),
    (errors.DeadlineExceeded, "timeout_error", "timeout_error"),
]


@pytest.mark.parametrize(("kind", "for_openai", "for_anthropic"), TYPES)
def test_error_types(kind: type[errors.EmberlineError], for_openai: str, for_anthropic: str) -> None:
    assert render_openai_error(kind("x")).body["error"]["type"] == for_openai
    body = {"type": "error", "error": {"type": for_anthropic, "message": str(kind("x"))}}
    assert render_anthropic_error(kind("x")).body == body


def test_too_long_prompt_is_described_in_the_words_of_each_protocol() -> None:
    error = errors.ContextLengthExceeded("messages has 9 tokens", num_tokens=9, max_tokens=5)
    assert render_openai_error(error).body["error"]["message"] == "messages has 9 tokens"
    expected = "prompt is too long: 9 tokens > 5 maximum; messages has 9 tokens"
    assert render_anthropic_error(error).body["error"]["message"] == expected


def test_error_without_a_hint_has_that_of_its_class() -> None:
    assert str(errors.ModelFileError("a is damaged")).startswith("a is damaged (hint: ")
    assert str(errors.ModelFileError("a is damaged", hint="run b")) == "a is damaged (hint: run b)"
    assert str(errors.EngineFailed("the engine failed")) == "the engine failed"


def test_error_names_the_field() -> None:
    error = errors.InvalidRequest("bad", param="messages[0].content")
    assert render_openai_error(error).body["error"]["param"] == "messages[0].content"


def test_retry_after_headers() -> None:
    for shape in (render_openai_error, render_anthropic_error):
        assert shape(errors.Overloaded("full", retry_after=7)).headers == {"retry-after": "7"}
        assert shape(errors.EngineUnavailable("starting")).headers["retry-after"].isdigit()
        assert shape(errors.Unauthorized("no key")).headers == {"www-authenticate": "Bearer"}
        assert shape(errors.InvalidRequest("bad")).headers == {}


@pytest.mark.parametrize("error", [KeyError("secret path /etc"), AssertionError("secret path /etc"), RecursionError()])
def test_internal_error_has_no_details(error: Exception) -> None:
    for shape in (render_openai_error, render_anthropic_error):
        reply = shape(error)
        assert reply.status == 500
        assert "secret" not in str(reply.body)
