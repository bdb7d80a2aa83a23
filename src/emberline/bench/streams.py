"""Streams completions over HTTP from several client processes, so that the clients do not slow down a fast server.

Each process runs its share of the concurrent streams. All processes have started and imported their libraries before
the first request is sent.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any

import msgspec

from emberline.bench.connection import HTTPRequestFailed, MinimalHTTPConnection

WORDS = ("river", "stone", "light", "engine", "garden", "winter", "seven", "music", "paper", "north")
PROMPT_WORDS = 200
REPLY_TIMEOUT_S = 180.0


@dataclass(slots=True)
class StreamTiming:
    """The latencies of one stream in seconds, measured by its client."""

    ttft_seconds: float | None = None  # from sending the request to its first text
    inter_token_seconds: list[float] = field(
        default_factory=list
    )  # between events with text; 0 where one read returned several
    tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StreamsResult:
    """The latencies of all streams of one measurement."""

    streams: list[StreamTiming]
    seconds: float

    @property
    def ttft_seconds(self) -> list[float]:
        return sorted(s.ttft_seconds for s in self.streams if s.ttft_seconds is not None)

    @property
    def inter_token_seconds(self) -> list[float]:
        return sorted(gap for s in self.streams for gap in s.inter_token_seconds)

    @property
    def tokens_per_second(self) -> float:
        return sum(s.tokens for s in self.streams) / self.seconds

    @property
    def errors(self) -> list[str]:
        return [s.error for s in self.streams if s.error is not None]


def quantile_of_sorted(sorted_values: Sequence[float], fraction: float) -> float:
    """Return the value below which `fraction` of the sorted values lie.

    For a fraction of 1, return the largest value.
    """
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * fraction))]


class ClientProcesses:
    """A set of client processes that measures one server, once for each call of `run`."""

    def __init__(self, count: int = 8) -> None:
        context = multiprocessing.get_context("spawn")
        self._clients: list[tuple[Any, Pipe]] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve_commands, args=(theirs,), daemon=True)
            process.start()
            self._clients.append((process, ours))
        for _, pipe in self._clients:
            pipe.recv()

    def run(
        self, url: str, model: str, streams: int, requests_per_stream: int, max_tokens: int, seed: int = 0
    ) -> StreamsResult:
        """Run `streams` concurrent streams, each with `requests_per_stream` requests one after another."""
        used = self._clients[: min(len(self._clients), streams)]
        began = time.perf_counter()
        for index, (_, pipe) in enumerate(used):
            share = streams // len(used) + (index < streams % len(used))
            pipe.send((url, model, share, requests_per_stream, max_tokens, seed * 1000 + index))
        timings = [timing for _, pipe in used for timing in pipe.recv()]
        return StreamsResult(timings, time.perf_counter() - began)

    def close(self) -> None:
        for process, pipe in self._clients:
            pipe.send(None)
            process.join(10.0)


def _serve_commands(pipe: Pipe) -> None:
    asyncio.run(_warm_up_client())
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        pipe.send(asyncio.run(_run_streams(*command)))


async def _warm_up_client() -> None:
    """Read one stream from a small local server, so that no measurement includes loading the client's libraries."""

    async def send_one_event(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        event = b'data: {"choices":[{"text":"a"}],"usage":{"completion_tokens":1}}\n\n'
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(event), event))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(send_one_event, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        [timing] = await _run_streams(f"http://127.0.0.1:{port}", "none", 1, 1, 1, 0)
    assert timing.tokens == 1, timing.error


async def _run_streams(
    url: str, model: str, streams: int, requests_per_stream: int, max_tokens: int, seed: int
) -> list[StreamTiming]:
    async def run_stream(index: int) -> list[StreamTiming]:
        words = random.Random(seed * 1000 + index)
        connection = MinimalHTTPConnection(url)
        try:
            return [await _send_request(connection, model, words, max_tokens) for _ in range(requests_per_stream)]
        finally:
            connection.close()

    done = await asyncio.gather(*(run_stream(index) for index in range(streams)))
    return [timing for timings in done for timing in timings]


async def _send_request(
    connection: MinimalHTTPConnection, model: str, rng: random.Random, max_tokens: int
) -> StreamTiming:
    prompt = " ".join(rng.choice(WORDS) for _ in range(PROMPT_WORDS))
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    timing = StreamTiming()
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            await _read_stream(connection, msgspec.json.encode(body), timing)
    except (HTTPRequestFailed, TimeoutError) as error:
        timing.error = str(error)[:200] or "timed out"
    return timing


async def _read_stream(connection: MinimalHTTPConnection, body: bytes, timing: StreamTiming) -> None:
    sent = last = time.perf_counter()
    rest = b""
    async with aclosing(connection.stream_reply("/v1/completions", body)) as parts:  # type: ignore[type-var]
        async for part in parts:
            now = time.perf_counter()
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                if b'"text"' in event:
                    if timing.ttft_seconds is None:
                        timing.ttft_seconds = now - sent
                    else:
                        timing.inter_token_seconds.append(now - last)
                    last = now
                if b'"usage":{' in event or b'"usage": {' in event:
                    timing.tokens = msgspec.json.decode(event.removeprefix(b"data: "))["usage"]["completion_tokens"]
