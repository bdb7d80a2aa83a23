"""FakeWorker: a worker without an engine, for tests and benchmarks of the router.

It registers with a router, sends heartbeats, streams replies, prefills and resumes streams like a real worker, at a
configurable speed. A test can request that it fails. To start one: `python -m emberline.cluster.fake --router URL`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec

from emberline.cluster.fake_completion import FakeCompletion, FakeForwardedRequest, FakeRequest
from emberline.cluster.registrar import PeersByModel
from emberline.cluster.registrar_group import RegistrarGroup
from emberline.cluster.registration import Heartbeat, ModelRegistration, WorkerRegistration
from emberline.cluster.resumable_streams import (
    RECLAIM_PATH,
    ReclaimRequest,
    ResumableStream,
    ResumableStreams,
    digest_request,
)
from emberline.core.config import Role
from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.core.events import TransferStats
from emberline.core.handoff import EVENT_IDS_HEADER, Handoff
from emberline.core.numerics import Numerics
from emberline.core.tls import TLSIdentity, open_identity
from emberline.core.tls_config import TLSConfig
from emberline.net.server import HTTPServer

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

FAKE_PATH = "/v1/chat/completions"  # path of all requests that it understands
RESUME_PATH, PREFILL_PATH, SLEEP_PATH = "/cluster/resume", "/cluster/prefill", "/cluster/sleep"
JSON_HEADERS = [(b"content-type", b"application/json")]
NDJSON_HEADERS = [(b"content-type", b"application/x-ndjson")]
SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
KV_BYTES_PER_TOKEN = 1 << 12
STATUS_BY_MODE = {"bad": 400, "missing": 404, "full": 429, "fail": 500, "refuse": 503}


class FakeFault(msgspec.Struct):
    """The failure that a test has requested from a fake worker."""

    mode: str = "well"  # or a key of STATUS_BY_MODE; or break, tear (send half a write), stall, die
    after: int = 3  # writes before the failure
    calls: str = ""  # path of the requests that fail; "": all
    times: int = 1 << 30  # number of failures


class FakeWorker:
    def __init__(
        self,
        name: str,
        token_interval_s: float = 0.0,
        max_running: int = 64,
        role: Role = "both",
        refuses_pairing: bool = False,
        dtype: str = "bfloat16",
    ) -> None:
        self.name, self.incarnation = name, uuid.uuid4().hex
        self.peer = {"name": name, "incarnation": uuid.uuid4().hex}
        self.token_interval_s = token_interval_s
        self.max_running = max_running
        self.role: Role = role
        self.refuses_pairing = refuses_pairing
        self.dtype = dtype  # only reported: the output does not depend on it
        self.paired: tuple[str, ...] = ()  # incarnations of the engines from which it can fetch blocks
        self.fault = FakeFault()
        self.asked = self.gone = self.running = self.step = self.prompts = self.generated = 0
        self.resumed = self.prefilled = self.pulled = 0
        self.offered_output = 0  # output tokens that prefill requests contained besides the prompt
        self.is_asleep, self.wakes = False, 0
        self.transfer = TransferStats()
        self.streams = ResumableStreams(self.incarnation, time.monotonic)
        self.seen: list[dict[str, str]] = []  # headers of the last requests

    def build_registration(self, url: str) -> WorkerRegistration:
        numerics = Numerics("fake", self.dtype, "plain", self.dtype, "cpu")
        model = ModelRegistration("fake", "fake", 8192, self.max_running, 65536, 16, self.peer, numerics=numerics)
        return WorkerRegistration(self.name, self.incarnation, url, (model,), self.role)

    def set_peers(self, peers: PeersByModel) -> None:
        self.paired = tuple(peer["incarnation"] for peer in peers.get("fake", ()) if not self.refuses_pairing)

    def build_heartbeat(self) -> Heartbeat:
        self.step += self.fault.mode != "stall"  # a healthy engine makes steps even if clients read slowly
        return Heartbeat(
            self.name,
            self.incarnation,
            running=self.running,
            step=self.step,
            prompt_tokens=self.prompts,
            generated_tokens=self.generated,
            prefix_queries=self.prompts,
            paired=self.paired,
            transfer=self.transfer,
            asleep=self.is_asleep,
        )

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        body = await _read_body(receive)
        path, headers = scope["path"], {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        if path == "/fake":  # control endpoint of tests
            self.fault = msgspec.json.decode(body, type=FakeFault) if body else self.fault
            return await _send_reply(send, 200, msgspec.json.encode(self._counters_by_name()))
        if path == SLEEP_PATH:
            self.is_asleep = msgspec.json.decode(body)["on"] and not self.running
            return await _send_reply(send, 200, b"{}")
        self.asked += 1
        self.wakes += self.is_asleep
        self.is_asleep = False
        self.seen = [*self.seen[-15:], {**headers, "?": scope["query_string"].decode(), "path": path}]
        fault = self._take_fault_for(path)
        if (status := STATUS_BY_MODE.get(fault.mode)) is not None:
            error = b'{"error":{"message":"not now","code":"queue_full"}}'
            return await _send_reply(send, status, error, [(b"retry-after", b"7")])
        self.running += 1
        disconnect = asyncio.create_task(_wait_for_disconnect(receive))
        work = asyncio.create_task(self._handle_request(path, headers, body, fault, send))
        try:
            await asyncio.wait((disconnect, work), return_when=asyncio.FIRST_COMPLETED)
            self.gone += not work.done()
        finally:
            self.running -= 1
            disconnect.cancel()
            work.cancel()
        return await work if work.done() else None

    def _counters_by_name(self) -> dict[str, Any]:
        counters = ("asked", "gone", "running", "prompts", "generated", "resumed", "prefilled", "pulled", "wakes")
        return {name: getattr(self, name) for name in (*counters, "offered_output", "seen")}

    def _take_fault_for(self, path: str) -> FakeFault:
        fault = self.fault
        if fault.mode == "well" or fault.times < 1 or fault.calls not in ("", path):
            return FakeFault()
        fault.times -= 1
        return fault

    async def _handle_request(
        self, path: str, headers: dict[str, str], body: bytes, fault: FakeFault, send: Send
    ) -> None:
        has_ids = headers.get(EVENT_IDS_HEADER) == "1"
        if path == RECLAIM_PATH:
            await self._handle_reclaim(msgspec.json.decode(body, type=ReclaimRequest), send)
        elif path == PREFILL_PATH:
            self.prefilled += 1
            self.transfer.published += 1
            await self._handle_prefill(msgspec.json.decode(body, type=FakeForwardedRequest), fault, send)
        elif path == RESUME_PATH:
            self.resumed += 1
            envelope = msgspec.json.decode(body, type=FakeForwardedRequest)
            await self._handle_completion(bytes(envelope.body), envelope.seed, envelope, True, has_ids, fault, send)
        else:
            is_tracked = headers.get("x-emberline-track") == "1"
            await self._handle_completion(
                body, int(headers.get("x-emberline-seed", "0")), None, is_tracked, has_ids, fault, send
            )

    async def _handle_reclaim(self, position: ReclaimRequest, send: Send) -> None:
        try:
            await _send_reply(send, 200, msgspec.json.encode(self.streams.reclaim(position, "")))
        except EmberlineError as e:
            await _send_reply(send, e.status, msgspec.json.encode({"error": {"message": str(e), "code": e.code}}))

    async def _handle_prefill(self, forwarded: FakeForwardedRequest, fault: FakeFault, send: Send) -> None:
        self.prompts += len(bytes(forwarded.body)) // 4
        self.offered_output += sum(len(group.tokens) for group in Handoff.parse(forwarded.handoff).groups)
        ticket = {"id": uuid.uuid4().hex, "peer": self.peer}
        lines = ({"ticket": ticket}, {"done": {"token": 1, "cached": 0, "seconds": self.token_interval_s}})
        await self._send_chunks([msgspec.json.encode(line) + b"\n" for line in lines], NDJSON_HEADERS, fault, send)

    async def _handle_completion(
        self,
        body: bytes,
        seed: int,
        forwarded: FakeForwardedRequest | None,
        is_tracked: bool,
        has_event_ids: bool,
        fault: FakeFault,
        send: Send,
    ) -> None:
        request = msgspec.json.decode(body, type=FakeRequest)
        is_tracked = is_tracked and not request.untracked
        completion = FakeCompletion(seed if request.seed is None else request.seed, request)
        prompt_tokens, resumed_tokens = len(body) // 4, 0
        if forwarded is not None:
            try:
                resumed_tokens = completion.count_resumed_tokens(forwarded)
            except InvalidRequest as e:
                return await _send_reply(send, 400, str(e).encode())
        if forwarded is not None and forwarded.handoff["source"]:
            self.pulled += 1
            self.transfer.pulls += 1
            self.transfer.pulled_bytes += prompt_tokens * KV_BYTES_PER_TOKEN
            self.transfer.pull_seconds += 0.001
            self.transfer.copy_seconds += 0.001
        else:
            self.prompts += prompt_tokens
        if request.stream:
            stream = self._open_stream(body, completion, seed, forwarded) if has_event_ids and is_tracked else None
            try:
                return await self._send_chunks(
                    completion.stream_chunks(prompt_tokens, resumed_tokens, is_tracked, stream),
                    SSE_HEADERS,
                    fault,
                    send,
                )
            finally:
                if stream is not None:
                    self.streams.close(stream, is_resumable=True)
        await asyncio.sleep(self.token_interval_s * completion.length)
        # A long reply must not delay heartbeats.
        reply_body = await asyncio.to_thread(completion.build_body, prompt_tokens)
        return await self._send_chunks(
            [reply_body], [*JSON_HEADERS, (b"content-length", str(len(reply_body)).encode())], fault, send
        )

    def _open_stream(
        self, body: bytes, completion: FakeCompletion, seed: int, forwarded: FakeForwardedRequest | None
    ) -> ResumableStream:
        return self.streams.open(
            Handoff.parse(forwarded.handoff) if forwarded is not None else Handoff(),
            tenant="",
            request_digest=digest_request(FAKE_PATH, body),
            reply_id=completion.id,
            created=1,
            seed=seed,
        )

    async def _send_chunks(self, chunks: Iterable[bytes], headers: Headers, fault: FakeFault, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for i, data in enumerate(chunks):
            if i == fault.after and fault.mode != "well":
                await _apply_fault(fault, data, send)
            self.generated += 1
            await send({"type": "http.response.body", "body": data, "more_body": True})
            await asyncio.sleep(self.token_interval_s)
        await send({"type": "http.response.body", "body": b""})


async def _apply_fault(fault: FakeFault, data: bytes, send: Send) -> None:
    match fault.mode:
        case "stall":
            await asyncio.Event().wait()
        case "die":
            os._exit(1)
        case "tear":
            await send({"type": "http.response.body", "body": data[: len(data) // 2], "more_body": True})
    raise ConnectionError("failure requested by a test")


async def _read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_reply(send: Send, status: int, body: bytes, extra_headers: Headers | None = None) -> None:
    headers = [*JSON_HEADERS, (b"content-length", str(len(body)).encode()), *(extra_headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def run_fake_worker(worker: FakeWorker, router_urls: Sequence[str], port: int, tls: TLSIdentity | None) -> None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    url = f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
    registrars = RegistrarGroup(
        router_urls,
        None,
        lambda: worker.build_registration(url),
        worker.build_heartbeat,
        worker.set_peers,
        tls.peer_client_context() if tls is not None else None,
    )
    stop = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    server = HTTPServer(worker, tls=tls.listener_context() if tls is not None else None)
    await server.start(listener)
    registrars.start()
    await stop.wait()
    await registrars.announce_shutdown()
    await server.stop(10.0)


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(
        description="Run a worker without an engine.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--router", action="append", default=[], help="URL of a router to register with; may be repeated"
    )
    parser.add_argument("--name", default="fake", help="name of the worker")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: any free port")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between two tokens")
    parser.add_argument("--max-running", type=int, default=64, help="requests in one batch, as registered")
    parser.add_argument("--role", default="both", choices=["prefill", "decode", "both"], help="role of the worker")
    parser.add_argument("--shy", action="store_true", help="fetch no blocks from other workers")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the weights, as registered")
    for name in ("--tls-cert", "--tls-key", "--tls-ca"):
        parser.add_argument(name, help="as for emberline worker")
    args = parser.parse_args()
    worker = FakeWorker(args.name, args.pace, args.max_running, args.role, args.shy, args.dtype)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        identity = open_identity(TLSConfig.for_listener(args.tls_cert, args.tls_key, args.tls_ca))
        runner.run(run_fake_worker(worker, args.router, args.port, identity))


if __name__ == "__main__":
    main()
