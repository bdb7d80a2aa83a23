"""The stream meter: bytes pass unchanged in any chunks, and broken streams are detected."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.fakes.reply import FakeReply, dialect_of_path
from emberline.gateway.streams.meter import RawReplyMeter, StreamMeter, check_reply
from emberline.wire.event_splitter import EventSplitter, parse_event

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
    return FakeReply(dialect_of_path(PATHS[dialect]), PATHS[dialect], asked, 5)


def stream(dialect: str, **more: Any) -> bytes:
    return b"".join(event for event, _ in reply(dialect, **more).events())


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_result_is_independent_of_chunk_boundaries(dialect: Any, data: st.DataObject) -> None:
    whole = stream(dialect)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    meter, passed = StreamMeter(dialect), b""
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        passed += meter.push(whole[start:end])
    meter.end()
    assert passed == whole and meter.broken is None
    usage, counted = meter.usage(b"")
    assert usage is not None and (usage.input, usage.output, counted) == (11, 5, False)
    assert meter.state.has_content and meter.state.has_ended and meter.state.model == "m"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_first_content_is_detected(dialect: Any) -> None:
    meter = StreamMeter(dialect)
    for event, is_content in reply(dialect).events():
        assert not meter.state.has_content
        meter.push(event)
        if is_content:
            break
    assert meter.state.has_content


@pytest.mark.parametrize("dialect", ["openai-chat", "anthropic"])
def test_tool_call_is_content(dialect: Any) -> None:
    meter = StreamMeter(dialect)
    tools = [{"name": "t", "function": {"name": "t"}}]
    events = [event for event, _ in reply(dialect, tools=tools).events() if b"word" not in event]
    for event in events:
        meter.push(event)
        if b"call_1" in event or b"toolu_1" in event:
            assert meter.state.has_content


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("lost", ["ending", "half"])
def test_cut_stream_is_broken(dialect: Any, lost: str) -> None:
    whole = stream(dialect)
    cut = whole.removesuffix(reply(dialect).last_event()) if lost == "ending" else whole[: len(whole) // 2]
    meter = StreamMeter(dialect)
    meter.push(cut)
    meter.end()
    if (dialect, lost) == ("openai-chat", "ending"):  # [DONE] is optional after a finish reason and usage
        assert meter.broken is None and meter.state.has_ended and meter.missing_end == b"data: [DONE]\n\n"
        return
    assert meter.broken is not None
    usage, counted = meter.usage(b"x" * 400)
    assert usage is not None and counted and usage.output > 0 and usage.input in (11, 100)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_error_event_is_detected_and_passed_on(dialect: Any) -> None:
    meter = StreamMeter(dialect)
    event = reply(dialect).error_event()
    assert meter.push(event + event) == event, "nothing is passed on after an error event"
    assert meter.state.error == "injected error"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("bad", [b"data: {\n\n", b"data: oops\n\n", b"data: 5\n\n", b"data: \xff\n\n"])
def test_malformed_event_is_detected_and_dropped(dialect: Any, bad: bytes) -> None:
    first = next(event for event, is_content in reply(dialect).events() if is_content)
    meter = StreamMeter(dialect)
    assert meter.push(first + bad + first) == first
    assert meter.broken is not None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_invalid_utf8_is_malformed(dialect: Any) -> None:
    first = next(event for event, is_content in reply(dialect).events() if is_content)
    meter = StreamMeter(dialect)
    assert meter.push(first + first.replace(b"word0", b"w\xff\xfe0")) == first
    assert meter.broken is not None and "malformed" in str(meter.broken)
    with pytest.raises(UpstreamBroken):
        check_reply(dialect, reply(dialect).whole_body().replace(b"word0", b"w\xff\xfe0"))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_deeply_nested_event_is_malformed(dialect: Any) -> None:
    meter = StreamMeter(dialect)
    deep = b"[" * 100_000 + b"]" * 100_000
    assert meter.push(b'data: {"type": "x", "deep": ' + deep + b"}\n\n") == b""
    assert meter.broken is not None and "malformed" in str(meter.broken)


def test_done_alone_is_broken() -> None:
    meter = StreamMeter("openai-chat")
    meter.push(b"data: [DONE]\n\n")
    assert meter.broken is not None


def test_unrequested_usage_is_hidden() -> None:
    with_, without = stream("openai-chat"), stream("openai-chat", stream_options=None)
    meter = StreamMeter("openai-chat", hide_usage=True)
    assert meter.push(with_) == without
    assert meter.usage(b"")[1] is False


def test_comments_and_crlf_pass() -> None:
    meter = StreamMeter("openai-chat")
    assert meter.push(b": processing\n\n") == b": processing\n\n" and not meter.state.has_content
    event = b'data: {"choices":[{"delta":{"content":"x"}}]}\r\n\r\n'
    assert meter.push(event[:-2]) == b"" and meter.push(event[-2:]) == event and meter.state.has_content


def test_splitter_splits_events() -> None:
    splitter = EventSplitter(UpstreamBroken)
    assert splitter.push(b"a: 1\n\nb: 2\r\n\r\nc") == [b"a: 1\n\n", b"b: 2\r\n\r\n"]
    assert (
        splitter.push(b": 3\n") == [] and splitter.partial_event == b"c: 3\n" and splitter.push(b"\n") == [b"c: 3\n\n"]
    )
    assert parse_event(b"event: x\ndata: {\ndata: }\n\n") == (b"x", b"{\n}")
    assert parse_event(b": comment\n\n") == (b"", b"") and parse_event(b"data:{}\n\n") == (b"", b"{}")


def test_raw_reply_ends_with_connection() -> None:
    meter = RawReplyMeter()
    assert meter.push(b"\x00\x01") == b"\x00\x01" and meter.state.has_content and not meter.state.has_ended
    meter.end()
    assert meter.broken is None and meter.usage(b"") == (None, False)
    empty = RawReplyMeter()
    empty.end()
    assert empty.broken is not None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_unstreamed_replies(dialect: Any) -> None:
    path = PATHS[dialect].replace("streamG", "g")
    body = FakeReply(dialect, path, {"model": "m"}, 5).whole_body()
    usage, model = check_reply(dialect, body)
    assert usage is not None and (usage.input, usage.output, model) == (11, 5, "m")
    for bad in (b"", b"{", body[:-3], b"[]", b"{}", b'{"error": {"message": "x"}}', b"<html>"):
        with pytest.raises(UpstreamBroken):
            check_reply(dialect, bad)
