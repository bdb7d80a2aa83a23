"""Provider streams that break: valid events are passed on first, and the outcome is not complete."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from emberline.core.clock import ManualClock
from emberline.gateway.core.errors import UpstreamBroken, UpstreamTimeout
from emberline.gateway.dialects.translate import StreamTranslator
from emberline.gateway.streams.meter import StreamMeter
from emberline.gateway.streams.provider_stream import MAX_BYTES_BEFORE_CONTENT, ProviderStream

PIECE = b'data: {"candidates":[{"content":{"parts":[{"text":"%b"}],"role":"model"}}]}\n\n'


class FakeIncoming:
    """An upstream reply that returns the given chunks."""

    def __init__(self, *reads: bytes) -> None:
        self.left = list(reads)
        self.closed = False

    async def read(self, seconds: float) -> bytes:
        return self.left.pop(0) if self.left else b""

    def close(self) -> None:
        self.closed = True


def make_stream(dialect: str, incoming: FakeIncoming) -> ProviderStream:
    call = SimpleNamespace(
        dialect=dialect, deadline=100.0, settings=SimpleNamespace(timeouts=SimpleNamespace(between_events=5.0))
    )
    return ProviderStream(
        cast("Any", call), cast("Any", incoming), StreamMeter(cast("Any", dialect)), None, ManualClock()
    )


async def start_stream(incoming: FakeIncoming) -> None:
    await make_stream("openai-chat", incoming).wait_for_content(50.0, lambda *_: None)


async def read_stream(dialect: str, *reads: bytes) -> tuple[bytes, str, str]:
    """Return the bytes passed on, the outcome, and the code of the error raised."""
    stream = make_stream(dialect, FakeIncoming(*reads))
    ended: list[str] = []
    await stream.wait_for_content(50.0, lambda _, how, code: ended.append(how))
    got = b""
    try:
        async for chunk in stream:
            got += chunk
    except UpstreamBroken as e:
        return got, ended[0], e.code
    return got, ended[0], ""


@pytest.mark.parametrize("together", [True, False])
def test_events_before_malformed_one_are_passed_on(together: bool) -> None:
    one, two, bad = PIECE % b"one", PIECE % b"two", b"data: {nonsense\n\n"
    reads = [one, two + bad] if together else [one, two, bad]
    assert asyncio.run(read_stream("gemini", *reads)) == (one + two, "cut", "upstream_broken")


def test_malformed_event_after_end_is_ignored() -> None:
    chat = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
    last = b'data: {"id":"a","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    got, how, code = asyncio.run(read_stream("openai-chat", chat, last + b"data: {nonsense\n\n"))
    assert (got, how, code) == (chat + last, "complete", "")


@pytest.mark.parametrize("event", [b": a comment\n\n", b'data: {"id":"a","choices":[]}\n\n'])
def test_events_without_content_are_bounded(event: bytes) -> None:
    many = event * (65536 // len(event))
    reads = [many] * (2 * MAX_BYTES_BEFORE_CONTENT // len(many))
    incoming = FakeIncoming(*reads)
    with pytest.raises(UpstreamBroken, match="no content in its first"):
        asyncio.run(start_stream(incoming))
    assert (len(reads) - len(incoming.left)) * len(many) <= MAX_BYTES_BEFORE_CONTENT + len(many)


def test_large_first_content_is_accepted() -> None:
    large = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * MAX_BYTES_BEFORE_CONTENT)
    asyncio.run(start_stream(FakeIncoming(b": a comment\n\n", large)))


CONTENT = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
STOP = b'data: {"id":"a","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'


def test_stream_without_done_is_complete() -> None:
    got, how, _ = asyncio.run(read_stream("openai-chat", CONTENT, STOP, USAGE))
    assert (got, how) == (CONTENT + STOP + USAGE + b"data: [DONE]\n\n", "complete")


@pytest.mark.parametrize("reads", [(CONTENT,), (CONTENT, USAGE), (CONTENT, STOP), (CONTENT, STOP, USAGE[:-2])])
def test_incomplete_stream_is_cut(reads: tuple[bytes, ...]) -> None:
    got, how, _ = asyncio.run(read_stream("openai-chat", *reads))
    assert how == "cut" and b"error" in got and b"[DONE]" not in got


def test_translated_stream_without_done_is_complete() -> None:
    async def run() -> tuple[bytes, list[str]]:
        stream = make_stream("openai-chat", FakeIncoming(CONTENT, STOP, USAGE))
        stream._translator = StreamTranslator("openai-chat", "anthropic")
        ended: list[str] = []
        await stream.wait_for_content(50.0, lambda _, how, code: ended.append(how))
        return b"".join([chunk async for chunk in stream]), ended

    got, ended = asyncio.run(run())
    assert ended == ["complete"] and b"message_stop" in got and b"error" not in got


class CommentingIncoming(FakeIncoming):
    """Sends one comment a second after its chunks, and data instead at every `every`-th time."""

    def __init__(self, clock: ManualClock, every: int, *reads: bytes) -> None:
        super().__init__(*reads)
        self.clock, self.every, self.comments = clock, every, 0

    async def read(self, seconds: float) -> bytes:
        if self.left:
            return self.left.pop(0)
        if seconds <= 1.0:
            self.clock.advance(max(seconds, 0.0))
            raise UpstreamTimeout("nothing came")
        self.clock.advance(1.0)
        self.comments += 1
        return CONTENT if self.comments % self.every == 0 else b": keep-alive\n\n"


@pytest.mark.parametrize(("every", "comments"), [(10**6, 4), (3, 100)])
def test_comments_do_not_count_as_events(every: int, comments: int) -> None:
    clock = ManualClock()
    incoming = CommentingIncoming(clock, every, CONTENT)
    stream = make_stream("openai-chat", incoming)
    stream._clock = clock
    ended: list[str] = []

    async def run() -> bytes:
        await stream.wait_for_content(50.0, lambda _, how, code: ended.append(f"{how} {code}"))
        return b"".join([chunk async for chunk in stream])

    stream._call.settings.timeouts.total = 100.0  # type: ignore[misc]
    got = asyncio.run(run())
    assert ended == ["cut upstream_timeout"] and abs(incoming.comments - comments) <= 1
    assert (b"sent no event for 5 s" in got) == (comments == 4)


def test_slow_client_does_not_count_as_provider_silence() -> None:
    async def run() -> str:
        clock = ManualClock()
        stream = make_stream(
            "openai-chat", FakeIncoming(CONTENT, b": keep-alive\n\n", CONTENT, STOP + b"data: [DONE]\n\n")
        )
        stream._clock = clock
        ended: list[str] = []
        await stream.wait_for_content(50.0, lambda _, how, code: ended.append(how))
        async for _ in stream:
            clock.advance(10.0)
        return ended[0]

    assert asyncio.run(run()) == "complete"
