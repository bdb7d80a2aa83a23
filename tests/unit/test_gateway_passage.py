"""A stream that breaks: what was good is passed on first, whatever came with it, and the end is never a clean one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from emberline.core.clock import ManualClock
from emberline.gateway.dialects.translate import StreamTranslator
from emberline.gateway.errors import Broken, TimedOut
from emberline.gateway.streams.meter import Meter
from emberline.gateway.streams.passage import MOST, Passage

PIECE = b'data: {"candidates":[{"content":{"parts":[{"text":"%b"}],"role":"model"}}]}\n\n'


class Said:
    """An Incoming that has said all there is."""

    def __init__(self, *reads: bytes) -> None:
        self.left = list(reads)
        self.closed = False

    async def read(self, seconds: float) -> bytes:
        return self.left.pop(0) if self.left else b""

    def close(self) -> None:
        self.closed = True


def passage_of(dialect: str, said: Said) -> Passage:
    call = SimpleNamespace(
        dialect=dialect, deadline=100.0, settings=SimpleNamespace(timeouts=SimpleNamespace(between_events=5.0))
    )
    return Passage(cast("Any", call), cast("Any", said), Meter(cast("Any", dialect)), None, ManualClock())


async def begun(said: Said) -> None:
    await passage_of("openai-chat", said).begin(50.0, lambda *_: None)


async def passed(dialect: str, *reads: bytes) -> tuple[bytes, str, str]:
    """What came through, how it ended, and what was raised."""
    passage = passage_of(dialect, Said(*reads))
    ended: list[str] = []
    await passage.begin(50.0, lambda _, how, code: ended.append(how))
    got = b""
    try:
        async for chunk in passage:
            got += chunk
    except Broken as e:
        return got, ended[0], e.code
    return got, ended[0], ""


@pytest.mark.parametrize("together", [True, False])
def test_good_events_before_a_malformed_one_are_passed_on(together: bool) -> None:
    one, two, bad = PIECE % b"one", PIECE % b"two", b"data: {nonsense\n\n"
    reads = [one, two + bad] if together else [one, two, bad]
    assert asyncio.run(passed("gemini", *reads)) == (one + two, "cut", "upstream_broken")


def test_a_malformed_one_after_the_ending_harms_nobody() -> None:
    chat = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
    last = b'data: {"id":"a","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    got, how, code = asyncio.run(passed("openai-chat", chat, last + b"data: {nonsense\n\n"))
    assert (got, how, code) == (chat + last, "complete", "")


@pytest.mark.parametrize("event", [b": a comment\n\n", b'data: {"id":"a","choices":[]}\n\n'])
def test_what_has_no_content_is_not_kept_for_ever(event: bytes) -> None:
    many = event * (65536 // len(event))
    reads = [many] * (2 * MOST // len(many))
    said = Said(*reads)
    with pytest.raises(Broken, match="no content in its first"):
        asyncio.run(begun(said))
    assert (len(reads) - len(said.left)) * len(many) <= MOST + len(many)


def test_a_first_content_that_is_large_is_one() -> None:
    large = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * MOST)
    asyncio.run(begun(Said(b": a comment\n\n", large)))


CONTENT = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
STOP = b'data: {"id":"a","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'


def test_a_stream_that_said_all_but_done_is_complete() -> None:
    got, how, _ = asyncio.run(passed("openai-chat", CONTENT, STOP, USAGE))
    assert (got, how) == (CONTENT + STOP + USAGE + b"data: [DONE]\n\n", "complete")


@pytest.mark.parametrize("reads", [(CONTENT,), (CONTENT, USAGE), (CONTENT, STOP), (CONTENT, STOP, USAGE[:-2])])
def test_a_stream_that_ends_before_that_is_cut(reads: tuple[bytes, ...]) -> None:
    got, how, _ = asyncio.run(passed("openai-chat", *reads))
    assert how == "cut" and b"error" in got and b"[DONE]" not in got


def test_a_translated_stream_without_done_is_complete() -> None:
    async def run() -> tuple[bytes, list[str]]:
        passage = passage_of("openai-chat", Said(CONTENT, STOP, USAGE))
        passage._translator = StreamTranslator("openai-chat", "anthropic")
        ended: list[str] = []
        await passage.begin(50.0, lambda _, how, code: ended.append(how))
        return b"".join([chunk async for chunk in passage]), ended

    got, ended = asyncio.run(run())
    assert ended == ["complete"] and b"message_stop" in got and b"error" not in got


class Commenting(Said):
    """After its reads come comments, one a second, for ever; or one event with data after so many of them."""

    def __init__(self, clock: ManualClock, every: int, *reads: bytes) -> None:
        super().__init__(*reads)
        self.clock, self.every, self.comments = clock, every, 0

    async def read(self, seconds: float) -> bytes:
        if self.left:
            return self.left.pop(0)
        if seconds <= 1.0:
            self.clock.advance(max(seconds, 0.0))
            raise TimedOut("nothing came")
        self.clock.advance(1.0)
        self.comments += 1
        return CONTENT if self.comments % self.every == 0 else b": keep-alive\n\n"


@pytest.mark.parametrize(("every", "comments"), [(10**6, 4), (3, 100)])
def test_comments_are_no_progress(every: int, comments: int) -> None:
    clock = ManualClock()
    said = Commenting(clock, every, CONTENT)
    passage = passage_of("openai-chat", said)
    passage._clock = clock
    ended: list[str] = []

    async def run() -> bytes:
        await passage.begin(50.0, lambda _, how, code: ended.append(f"{how} {code}"))
        return b"".join([chunk async for chunk in passage])

    passage._call.settings.timeouts.total = 100.0  # type: ignore[misc]
    got = asyncio.run(run())
    assert ended == ["cut upstream_timeout"] and abs(said.comments - comments) <= 1
    assert (b"sent no event for 5 s" in got) == (comments == 4)


def test_time_that_the_client_takes_is_not_the_providers_silence() -> None:
    async def run() -> str:
        clock = ManualClock()
        passage = passage_of("openai-chat", Said(CONTENT, b": keep-alive\n\n", CONTENT, STOP + b"data: [DONE]\n\n"))
        passage._clock = clock
        ended: list[str] = []
        await passage.begin(50.0, lambda _, how, code: ended.append(how))
        async for _ in passage:
            clock.advance(10.0)
        return ended[0]

    assert asyncio.run(run()) == "complete"
