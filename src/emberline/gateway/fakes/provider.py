"""FakeProvider: a provider without a model, for tests and benchmarks.

It answers in every dialect at the usual paths, at a set pace, and can be made to fail in every way that providers fail:
`python -m emberline.gateway.fakes.provider --port 9000`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from emberline.gateway.fakes.foreign_dialects import make_count_or_embeddings, make_reply
from emberline.gateway.fakes.openai_account import FakeOpenAIAccount
from emberline.gateway.fakes.reply import FakeReply
from emberline.net.json_errors import JSON_DECODE_ERRORS

FAULTS = (
    "429",
    "500",
    "503",  # with Retry-After
    "refused",  # closes the connection before it reads anything
    "tls",  # answers a TLS handshake with plain HTTP, as a plain port called with https does
    "silent",  # sends nothing at all
    "stall",  # sends nothing after its headers
    "stall-later",  # sends nothing from the middle of a stream on
    "cut",  # closes the connection in the middle of a stream or a body
    "bad-json",  # an invalid body
    "bad-event",  # an invalid event
    "error-event",  # an error event within a stream
    "empty",  # status 200 without a body
    "no-ending",  # a stream without its last event
    "wrong-type",  # an HTML page instead of a reply
    "drip",  # one byte at a time, without end
)
FOREVER_S = 3600.0
FAULT_DELAY_S = 0.05


@dataclass(slots=True)
class ReceivedRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        form = self.headers.get("content-type", "").startswith(("application/x-www-form-urlencoded", "multipart/"))
        return msgspec.json.decode(self.body) if self.body and not form else {}


@dataclass
class FakeProvider:
    """A fake provider that listens on a local port.

    `script` lists the faults of the next requests, one fault for each request. All later requests get `fault`. An empty
    string means no fault.

    A request whose model is the name of a fault gets that fault. "cut@5" cuts the connection after five pieces of
    content.
    """

    fault: str = ""
    script: list[str] = field(default_factory=list)
    fault_after: int = 3  # pieces of content before a fault in the middle of a stream
    words: int = 8  # of a reply, if the request sets no limit
    text: str = ""  # sent instead of numbered words
    pace: float = 0.0  # seconds between two events of a stream
    retry_after: str = "1"
    always_sends_usage: bool = False  # streams end with usage even if the request does not ask for it
    requests: list[ReceivedRequest] = field(default_factory=list)
    count: int = 0
    running: int = 0
    gone: int = 0  # clients that disconnected before the end
    max_kept_requests: int = 64
    account: FakeOpenAIAccount = field(default_factory=FakeOpenAIAccount)

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> FakeProvider:
        self._server = await asyncio.start_server(self._serve_connection, host, port, limit=1 << 24, backlog=1024)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        return self

    async def close(self) -> None:
        self._server.close()
        self._server.close_clients() if hasattr(self._server, "close_clients") else None

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            first_byte: bytes | None = b""
            while first_byte is not None:
                first_byte = await self._answer_request(first_byte or await reader.readexactly(1), reader, writer)
        writer.close()

    async def _answer_request(
        self, first_byte: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes | None:
        """Answer one request, whose first byte was already read.

        Return the first byte of the next request, b"" if that byte has not arrived, or None if the connection is
        closed.
        """
        if first_byte == b"\x16":  # a TLS handshake
            await _send_response(writer, 400, "text/plain", b"this is a plain HTTP port")
            return None
        head = (first_byte + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        request = ReceivedRequest(method, path, headers, body)
        if path == "/fake":
            await self._apply_control_request(request, writer)
            return b""
        self.count += 1
        self.requests = [*self.requests[-self.max_kept_requests + 1 :], request] if self.max_kept_requests else []
        fault, fault_after = self._choose_fault(request)
        if fault == "refused":
            writer.transport.abort()
            return None
        self.running += 1
        next_byte = asyncio.ensure_future(reader.read(1))
        work = asyncio.ensure_future(self._send_reply(request, fault, fault_after, writer))
        try:
            await asyncio.wait((next_byte, work), return_when=asyncio.FIRST_COMPLETED)
            self.gone += not work.done()
            if not work.done() or not work.result():
                return None
            return next_byte.result() or None if next_byte.done() else b""
        finally:
            self.running -= 1
            for task in (next_byte, work):
                task.cancel()
                with suppress(asyncio.CancelledError, ConnectionError):
                    await task

    def _choose_fault(self, request: ReceivedRequest) -> tuple[str, int]:
        try:
            name, _, after = str(request.json.get("model")).partition("@")
        except (*JSON_DECODE_ERRORS, AttributeError):
            name, after = "", ""
        if name in FAULTS:
            return name, int(after or self.fault_after)
        return self.script.pop(0) if self.script else self.fault, self.fault_after

    async def _apply_control_request(self, request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        """Set attributes of this object from the JSON of a request to /fake, and reply with the counters."""
        for name, value in request.json.items():
            setattr(self, name, value)
        counts = {name: getattr(self, name) for name in ("count", "running", "gone", "fault", "script")}
        await _send_response(writer, 200, "application/json", msgspec.json.encode(counts))

    # -- replies -------------------------------------------------------------------------------------------------------

    async def _send_reply(
        self, request: ReceivedRequest, fault: str, fault_after: int, writer: asyncio.StreamWriter
    ) -> bool:
        """Send the reply, with the fault if there is one. Return whether the connection can be reused."""
        if fault == "silent":
            await asyncio.sleep(FOREVER_S)
        kind = request.headers.get("content-type", "")
        if not fault and (found := self.account.answer(request.method, request.path, request.body, kind)) is not None:
            await _send_response(writer, found.status, found.content_type, found.body)
            return True
        if not fault and (fields := make_count_or_embeddings(request.path, request.json)) is not None:
            await _send_response(writer, 200, "application/json", msgspec.json.encode(fields))
            return True
        reply = make_reply(request.path, request.headers.get("host", ""), request.json, self.words)
        reply.set_text(self.text)
        if request.path.partition("?")[0].endswith("v1/responses"):
            self.account.add_response(reply, request.json)
        reply.always_sends_usage = self.always_sends_usage
        if fault in ("401", "429", "500", "503"):
            more = f"retry-after: {self.retry_after}\r\n" if fault == "503" else ""
            await _send_response(writer, int(fault), "application/json", reply.error_body(int(fault)), more)
            return True
        if fault in ("empty", "wrong-type"):
            kind = "text/html" if fault == "wrong-type" else reply.content_type
            await _send_response(writer, 200, kind, b"<html>Please log in.</html>" if fault == "wrong-type" else b"")
            return True
        if reply.stream:
            return await self._send_stream(reply, fault, fault_after, writer)
        return await self._send_whole_reply(reply, fault, writer)

    async def _send_whole_reply(self, reply: FakeReply, fault: str, writer: asyncio.StreamWriter) -> bool:
        body = reply.whole_body()
        if fault == "error-event":
            body = reply.error_body(500)
        if fault in ("bad-json", "bad-event", "no-ending"):
            body = body[:-5]
        if fault in ("stall", "stall-later", "cut", "drip"):
            writer.write(_response_head(200, "application/json", len(body)))
            writer.write(body[: 0 if fault == "stall" else len(body) // 2])
            await _break_off_reply(writer, fault, body[len(body) // 2 :])
            return False
        await _send_response(writer, 200, "application/json", body)
        return True

    async def _send_stream(self, reply: FakeReply, fault: str, fault_after: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(_response_head(200, reply.content_type))
        if fault == "stall":
            await asyncio.sleep(FOREVER_S)
        async for event in self._events_until_fault(reply, fault, fault_after):
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
        if fault in ("stall-later", "cut", "drip"):
            await _break_off_reply(writer, fault, b"".join(b"1\r\n%c\r\n" % c for c in b"data: " + b"x" * 4000))
            return False
        writer.write(b"0\r\n\r\n")
        return True

    async def _events_until_fault(self, reply: FakeReply, fault: str, fault_after: int) -> AsyncIterator[bytes]:
        content, ending = 0, reply.last_event() if fault == "no-ending" else b""
        for event, is_content in reply.events():
            if fault and is_content and content == fault_after:
                # Earlier events must arrive in a separate packet.
                await asyncio.sleep(FAULT_DELAY_S * bool(fault_after))
                if fault in ("bad-event", "bad-json"):
                    yield b'data: {"choices": [{"delta": \n\n'
                elif fault == "error-event":
                    yield reply.error_event()
                if fault != "no-ending":
                    return
            if fault == "no-ending" and event == ending:
                return
            content += is_content
            yield event
            if self.pace:
                await asyncio.sleep(self.pace)


async def _break_off_reply(writer: asyncio.StreamWriter, fault: str, unsent: bytes) -> None:
    await writer.drain()
    if fault == "cut":
        await asyncio.sleep(FAULT_DELAY_S)
        writer.transport.abort()
    elif fault == "drip":
        for i in range(len(unsent)):
            writer.write(unsent[i : i + 1])
            await writer.drain()
            await asyncio.sleep(FAULT_DELAY_S)
    await asyncio.sleep(FOREVER_S)


def _response_head(status: int, content_type: str, length: int | None = None, extra_headers: str = "") -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"HTTP/1.1 {status} Fake\r\ncontent-type: {content_type}\r\n{size}\r\n{extra_headers}\r\n".encode()


async def _send_response(
    writer: asyncio.StreamWriter, status: int, content_type: str, body: bytes, extra_headers: str = ""
) -> None:
    writer.write(_response_head(status, content_type, len(body), extra_headers) + body)
    await writer.drain()


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(description="A fake provider without a model, for tests and benchmarks.")
    parser.add_argument("--port", type=int, default=0, help="TCP port; 0 chooses a free one")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between two events of a stream")
    args = parser.parse_args()

    async def run() -> None:
        fake = await FakeProvider(pace=args.pace, max_kept_requests=0).start(args.port)
        print(fake.url, flush=True)
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


if __name__ == "__main__":
    main()
