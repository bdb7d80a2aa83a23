"""Replies without an engine: random deltas, and the official clients connected to the parsers and writers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
from hypothesis import strategies as st

from emberline.api.call import ChatCall
from emberline.wire import deltas, sse
from emberline.wire.usage import Usage

TEXT = st.text(max_size=12)
PIECES = st.lists(TEXT, min_size=1, max_size=4)
ARGUMENTS = st.dictionaries(TEXT, st.integers() | TEXT | st.none() | st.lists(st.booleans(), max_size=2), max_size=3)


def token(text: str, logprob: float = -0.5, top: Sequence[deltas.TokenInfo] = ()) -> deltas.TokenInfo:
    return deltas.TokenInfo(len(text), text, text.encode(), logprob, top)


@st.composite
def replies(draw: st.DrawFn) -> list[deltas.Delta]:
    """Generate the deltas of one choice: any segments in any order, each in any number of pieces."""
    content: list[deltas.Delta] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=5)):
        if kind == "text":
            content += [deltas.TextDelta(piece, 0, [token(piece)]) for piece in draw(PIECES)]
        elif kind == "reasoning":
            content += [deltas.ReasoningDelta(piece) for piece in draw(PIECES)]
        else:
            content.append(deltas.ToolCallStart(calls, f"call_{calls}", "tool"))
            content += [deltas.ToolCallArguments(calls, piece) for piece in _cut(draw, json.dumps(draw(ARGUMENTS)))]
            calls += 1
    prompt, cached, written = draw(st.integers(0, 99)), draw(st.integers(0, 99)), draw(st.integers(0, 99))
    return [
        deltas.ReplyStart(prompt + cached, cached),
        *content,
        _finish(draw, calls),
        deltas.UsageUpdate(Usage(input=prompt + cached, output=written, cached_read=cached, reasoning=written // 2)),
    ]


def _cut(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _finish(draw: st.DrawFn, calls: int) -> deltas.Finish:
    endings = (
        [deltas.Finish("tool_calls")]
        if calls
        else [deltas.Finish("stop"), deltas.Finish("stop", "END"), deltas.Finish("length")]
    )
    return draw(st.sampled_from(endings))


def play(writer: deltas.ReplyWriter, reply: Sequence[deltas.Delta]) -> bytes:
    return b"".join([writer.write(delta) for delta in (deltas.StreamStart(), *reply, deltas.StreamEnd())])


def events(stream: bytes) -> list[dict[str, Any]]:
    """Return the payloads of named events and check that each event's name is its type."""
    payloads = []
    for event in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n", 1)
        payloads.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {payloads[-1]['type']}"
    return payloads


class Answering:
    """A server without a socket: it parses each request and replies with the deltas."""

    def __init__(self, parse: Callable[[bytes], ChatCall], writer: Callable[..., deltas.ReplyWriter], id: str) -> None:
        self.calls: list[ChatCall] = []
        self.deltas: Sequence[deltas.Delta] = ()
        self.http = httpx2.Client(transport=httpx2.MockTransport(self._answer))
        self._parse, self._renderer, self._id = parse, writer, id

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        call = self._parse(request.content)
        self.calls.append(call)
        writer = self._renderer(call, self._id, 1700000000, "fp_1")
        stream = play(writer, self.deltas)
        if call.stream:
            return httpx2.Response(200, content=stream, headers={"content-type": "text/event-stream"})
        return httpx2.Response(200, content=sse.dumps(writer.body()), headers={"content-type": "application/json"})
