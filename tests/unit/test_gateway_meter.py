"""The stream meter: results do not depend on chunk boundaries, bytes pass unchanged, broken streams are detected."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.gateway.errors import Broken
from emberline.gateway.fakes.reply import FakeReply, dialect_at
from emberline.gateway.streams.meter import Meter, RawMeter, check_whole
from emberline.gateway.streams.splitter import Splitter, payload_of

PATHS = {
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/g:streamGenerateContent",
}
DIALECTS: list[Any] = list(PATHS)
COUNTS = {"stream_options": {"include_usage": True}}


def reply(dialect: str, **more: Any) -> FakeReply:
    asked = {"stream": True, "model": "m", **COUNTS, **more}
    return FakeReply(dialect_at(PATHS[dialect]), PATHS[dialect], asked, 5)


def stream(dialect: str, **more: Any) -> bytes:
    return b"".join(event for event, _ in reply(dialect, **more).events())


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_result_is_independent_of_chunk_boundaries(dialect: Any, data: st.DataObject) -> None:
    whole = stream(dialect)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    meter, passed = Meter(dialect), b""
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        passed += meter.push(whole[start:end])
    meter.end()
    assert passed == whole and meter.broken is None
    usage, counted = meter.usage(b"")
    assert usage is not None and (usage.input, usage.output, counted) == (11, 5, False)
    assert meter.signs.begun and meter.signs.ended and meter.signs.model == "m"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_first_content_is_detected(dialect: Any) -> None:
    meter = Meter(dialect)
    for event, is_content in reply(dialect).events():
        assert not meter.signs.begun
        meter.push(event)
        if is_content:
            break
    assert meter.signs.begun


@pytest.mark.parametrize("dialect", ["openai-chat", "anthropic"])
def test_tool_call_is_content(dialect: Any) -> None:
    meter = Meter(dialect)
    tools = [{"name": "t", "function": {"name": "t"}}]
    events = [event for event, _ in reply(dialect, tools=tools).events() if b"word" not in event]
    for event in events:
        meter.push(event)
        if b"call_1" in event or b"toolu_1" in event:
            assert meter.signs.begun


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("lost", ["ending", "half"])
def test_cut_stream_is_broken(dialect: Any, lost: str) -> None:
    whole = stream(dialect)
    cut = whole.removesuffix(reply(dialect).ending()) if lost == "ending" else whole[: len(whole) // 2]
    meter = Meter(dialect)
    meter.push(cut)
    meter.end()
    if (dialect, lost) == ("openai-chat", "ending"):  # [DONE] is optional after a finish reason and usage
        assert meter.broken is None and meter.signs.ended and meter.missing == b"data: [DONE]\n\n"
        return
    assert meter.broken is not None
    usage, counted = meter.usage(b"x" * 400)
    assert usage is not None and counted and usage.output > 0 and usage.input in (11, 100)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_error_event_is_detected_and_passed_on(dialect: Any) -> None:
    meter = Meter(dialect)
    event = reply(dialect).error_event()
    assert meter.push(event + event) == event, "nothing is passed on after an error event"
    assert meter.signs.failed == "injected error"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("bad", [b"data: {\n\n", b"data: oops\n\n", b"data: 5\n\n", b"data: \xff\n\n"])
def test_malformed_event_is_detected_and_dropped(dialect: Any, bad: bytes) -> None:
    first = next(event for event, is_content in reply(dialect).events() if is_content)
    meter = Meter(dialect)
    assert meter.push(first + bad + first) == first
    assert meter.broken is not None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_invalid_utf8_is_malformed(dialect: Any) -> None:
    first = next(event for event, is_content in reply(dialect).events() if is_content)
    meter = Meter(dialect)
    assert meter.push(first + first.replace(b"word0", b"w\xff\xfe0")) == first
    assert meter.broken is not None and "malformed" in str(meter.broken)
    with pytest.raises(Broken):
        check_whole(dialect, reply(dialect).whole().replace(b"word0", b"w\xff\xfe0"))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_deeply_nested_event_is_malformed(dialect: Any) -> None:
    meter = Meter(dialect)
    deep = b"[" * 100_000 + b"]" * 100_000
    assert meter.push(b'data: {"type": "x", "deep": ' + deep + b"}\n\n") == b""
    assert meter.broken is not None and "malformed" in str(meter.broken)


def test_done_alone_is_broken() -> None:
    meter = Meter("openai-chat")
    meter.push(b"data: [DONE]\n\n")
    assert meter.broken is not None


def test_unrequested_usage_is_hidden() -> None:
    with_, without = stream("openai-chat"), stream("openai-chat", stream_options=None)
    meter = Meter("openai-chat", hide_usage=True)
    assert meter.push(with_) == without
    assert meter.usage(b"")[1] is False


def test_comments_and_crlf_pass() -> None:
    meter = Meter("openai-chat")
    assert meter.push(b": processing\n\n") == b": processing\n\n" and not meter.signs.begun
    event = b'data: {"choices":[{"delta":{"content":"x"}}]}\r\n\r\n'
    assert meter.push(event[:-2]) == b"" and meter.push(event[-2:]) == event and meter.signs.begun


def test_splitter_splits_events() -> None:
    splitter = Splitter()
    assert splitter.push(b"a: 1\n\nb: 2\r\n\r\nc") == [b"a: 1\n\n", b"b: 2\r\n\r\n"]
    assert splitter.push(b": 3\n") == [] and splitter.rest == b"c: 3\n" and splitter.push(b"\n") == [b"c: 3\n\n"]
    assert payload_of(b"event: x\ndata: {\ndata: }\n\n") == (b"x", b"{\n}")
    assert payload_of(b": comment\n\n") == (b"", b"") and payload_of(b"data:{}\n\n") == (b"", b"{}")


def test_raw_reply_ends_with_connection() -> None:
    meter = RawMeter()
    assert meter.push(b"\x00\x01") == b"\x00\x01" and meter.signs.begun and not meter.signs.ended
    meter.end()
    assert meter.broken is None and meter.usage(b"") == (None, False)
    empty = RawMeter()
    empty.end()
    assert empty.broken is not None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_unstreamed_replies(dialect: Any) -> None:
    path = PATHS[dialect].replace("streamG", "g")
    body = FakeReply(dialect, path, {"model": "m"}, 5).whole()
    usage, model = check_whole(dialect, body)
    assert usage is not None and (usage.input, usage.output, model) == (11, 5, "m")
    for bad in (b"", b"{", body[:-3], b"[]", b"{}", b'{"error": {"message": "x"}}', b"<html>"):
        with pytest.raises(Broken):
            check_whole(dialect, bad)
