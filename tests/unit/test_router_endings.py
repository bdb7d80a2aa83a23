"""A stream whose ending has passed is over, though the connection it came by is still open."""

from __future__ import annotations

import asyncio
import gzip

import pytest
from local_router import REQUEST, LocalRouter

from emberline.core.handoff import TokenGroup

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WORD = (
    b'data: {"id":"chatcmpl-1","created":1,"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'
)
ENDING = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1}}\n\ndata: [DONE]\n\n'


def chunk(said: TokenGroup, events: bytes) -> bytes:
    group = said.to_comment(len(events)) + events
    return b"%x\r\n%b\r\n" % (len(group), group)


class LingeringWorker:
    """A worker that says all there is to say, and closes its reply later."""

    def __init__(self) -> None:
        self.told = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        said = chunk(TokenGroup(0, (1,), "stop"), WORD) if b" /cluster/resume " not in head else b""
        writer.write(HEAD + said)
        await writer.drain()
        await asyncio.sleep(0.1)  # so that it passes by itself
        writer.write(chunk(TokenGroup(0, ()), ENDING))
        await writer.drain()
        self.told.set()
        await asyncio.sleep(0.4)
        writer.write(b"0\r\n\r\n")
        writer.close()


def test_drain_after_final_event_does_not_repeat_it() -> None:
    async def main() -> bytes:
        worker, router = LingeringWorker(), await LocalRouter().start()
        for name in "ab":
            await router.add_worker(name, worker.answer)
        asking = asyncio.create_task(router.relay_request())
        await worker.told.wait()
        await asyncio.sleep(0.1)
        (busy,) = (each.name for each in router.app.dispatcher.workers.values() if each.open_requests)
        router.app.dispatcher.set_draining(busy, True, move_streams=True)
        got = await asking
        await router.stop()
        return got

    got = asyncio.run(main())
    assert got.count(b"hi") == got.count(b'"usage"') == got.count(b"[DONE]") == 1 and got.endswith(b"0\r\n\r\n")


def test_native_stream_moves_only_to_native_worker() -> None:
    strangers: list[bytes] = []

    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + chunk(TokenGroup(0, (1,)), WORD.replace(b'"stop"', b"null")))
        await writer.drain()
        begun.set()
        await joined.wait()
        writer.close()

    async def goes_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b" /cluster/resume " not in await reader.readuntil(b"\r\n\r\n"):
            busy.set()
            await asyncio.sleep(30)
        writer.write(HEAD + chunk(TokenGroup(0, (2,), "stop"), WORD) + chunk(TokenGroup(0, ()), ENDING) + b"0\r\n\r\n")

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        strangers.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async def main() -> bytes:
        router = await LocalRouter().start()
        await router.add_worker("b", goes_on)
        other = asyncio.create_task(router.relay_request())
        await busy.wait()
        await router.add_worker("a", breaks)
        asking = asyncio.create_task(router.relay_request())
        await begun.wait()
        for name in ("v0", "v1", "v2"):
            await router.add_worker(name, stranger, "vllm")
        joined.set()
        got = await asking
        other.cancel()
        await router.stop()
        return got

    busy, begun, joined = (asyncio.Event() for _ in range(3))
    got = asyncio.run(main())
    assert got.count(b"hi") == 2 and got.count(b"[DONE]") == 1 and not strangers


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("said", [b'data: {"error": "short"}\n', b'data: {"id":"1"}'])
def test_stream_without_complete_event_is_passed_unchanged(said: bytes, packed: bool, sized: bool) -> None:
    """As other servers may write it; and unpacked, if it came packed."""
    body = gzip.compress(said) if packed else said
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + packed * b"content-encoding: gzip\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if sized:
            writer.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        else:
            writer.write(b"%btransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (head, len(body), body))

    async def main() -> bytes:
        router = await LocalRouter().start()
        await router.add_worker("v", answer, "vllm")
        got = await router.relay_request()
        await router.stop()
        return got

    got = asyncio.run(main())
    assert got.startswith(b"HTTP/1.1 200") and said in got and b"content-encoding" not in got


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("prefix", ["", "/serving/v"])
def test_foreign_events_pass_one_by_one(line_end: bytes, prefix: str) -> None:
    """Lines may end in CRLF, as sse-starlette writes them: such a stream came only at its end. The next event is sent
    only when the client has the one before. A path in the server's URL is kept."""
    asked_for: list[bytes] = []
    received = asyncio.Queue[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked_for.append((await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in (b": ping", b"data: 1", b"data: 2", b": ping", b"data: [DONE]"):
            for part in (event, line_end, line_end):  # a CRLF may be cut anywhere
                for byte in (part[:1], part[1:]):
                    if byte:
                        writer.write(b"%x\r\n%b\r\n" % (len(byte), byte))
                        await writer.drain()
            if not event.startswith(b":"):
                async with asyncio.timeout(20):
                    got = b""
                    while event not in got:
                        got += await received.get()
        writer.write(b"0\r\n\r\n")

    async def main() -> bytes:
        router = await LocalRouter().start()
        await router.add_worker("v", answer, "vllm", path=prefix)
        whole = b""
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(REQUEST)
        async with asyncio.timeout(60):
            while not whole.endswith(b"0\r\n\r\n"):
                data = await reader.read(4096)
                assert data, "the router closed the connection"
                whole += data
                received.put_nowait(data)
        writer.close()
        await router.stop()
        return whole

    got = asyncio.run(main())
    assert b"ping" not in got and got.count(b"data: ") == 3
    assert asked_for == [f"{prefix}/v1/chat/completions".encode()]
