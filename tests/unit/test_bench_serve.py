"""The load client against a server that we control: it counts what came, when, and what went wrong."""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from emberline.bench import processes
from emberline.bench.client import CompletionClient
from emberline.bench.report import BenchReport
from emberline.bench.serve import add_latencies, find_local_processes, make_uniform_job, run_closed_loop, run_open_loop
from emberline.cli import bench as command
from emberline.core.errors import EngineUnavailable, ModelNotFound


class FakeServer:
    """Streams `max_tokens` events, in pieces cut at odd places. Every `fail`-th request gets a 429."""

    def __init__(self, fail: int = 0, leaked: int = 0) -> None:
        self.fail, self.leaked = fail, leaked
        self.connections = self.requests = self.open = self.most_open = 0
        self.bodies: list[dict[str, Any]] = []

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET /stats"):
                    self._reply(writer, b"200 OK", json.dumps(self.stats()).encode())
                    continue
                if head.startswith(b"GET "):  # /v1/models
                    listed = {"data": [{"id": "smollm2"}]}
                    self._reply(writer, b"200 OK", json.dumps(listed).encode())
                    continue
                length = int(next(line for line in head.lower().split(b"\r\n") if b"content-length" in line).split()[1])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                self.requests += 1
                if self.fail and self.requests % self.fail == 0:
                    self._reply(writer, b"429 Too Many Requests", b'{"error": {"message": "full"}}')
                else:
                    await self._stream(writer, self.bodies[-1])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def stats(self) -> dict[str, int]:
        blocks = {"blocks_total": 10, "blocks_free": 7 - self.leaked, "blocks_cached": 3}
        return {"running": 0, "waiting": 0, "engine_restarts": 0, "preemptions": 0, **blocks}

    def _reply(self, writer: asyncio.StreamWriter, status: bytes, body: bytes) -> None:
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        chunks = [{"choices": [{"text": f" t{i}"}]} for i in range(body["max_tokens"])]
        last = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": body["max_tokens"]}}
        text = "".join(f"data: {json.dumps(c)}\n\n" for c in [*chunks, last]) + "data: [DONE]\n\n"
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            for at in range(0, len(text), 37):
                piece = text[at : at + 37].encode()
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
                await asyncio.sleep(0.0005)
            writer.write(b"0\r\n\r\n")
        finally:
            self.open -= 1


@contextmanager
def serving(server: FakeServer) -> Iterator[str]:
    """In a thread of its own, as another program would be."""
    up: queue.SimpleQueue[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()

    async def life() -> None:
        stop = asyncio.Event()
        listening = await asyncio.start_server(server.talk, "127.0.0.1", 0)
        up.put((listening.sockets[0].getsockname()[1], asyncio.get_running_loop(), stop))
        await stop.wait()
        listening.close()

    thread = threading.Thread(target=lambda: asyncio.run(life()))
    thread.start()
    port, loop, stop = up.get(timeout=10)
    yield f"http://127.0.0.1:{port}/v1"
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)


def test_every_token_is_seen_and_connections_are_kept() -> None:
    server = FakeServer()
    with serving(server) as url:
        traces = asyncio.run(run_closed_loop(CompletionClient(url, "m"), make_uniform_job(12, 5, 7, 100), 3))
    assert [trace.error for trace in traces] == [None] * 12
    assert all(trace.tokens == 7 and len(trace.event_times) == 7 and trace.prompt_tokens == 5 for trace in traces)
    assert all(len(trace.inter_token_seconds) == 6 for trace in traces)
    assert (server.connections, server.most_open) == (3, 3)
    assert server.bodies[0]["ignore_eos"] is True and len(server.bodies[0]["prompt"]) == 5


def test_first_token_lies_between_sent_and_ended() -> None:
    with serving(FakeServer()) as url:
        (trace,) = asyncio.run(run_closed_loop(CompletionClient(url, "m"), make_uniform_job(1, 5, 7, 100), 1))
    timing = trace.timing
    assert timing.ttft is not None and timing.e2e is not None and timing.decode is not None
    assert 0 < timing.ttft < timing.e2e
    assert timing.ttft + timing.decode == pytest.approx(timing.e2e)


def test_arrivals_at_a_rate_do_not_wait_for_each_other() -> None:
    server = FakeServer()
    with serving(server) as url:
        traces = asyncio.run(run_open_loop(CompletionClient(url, "m"), make_uniform_job(20, 5, 30, 100), rate=2000.0))
    assert len(traces) == 20 and server.most_open > 3


def test_errors_are_counted_and_do_not_stop_the_rest() -> None:
    with serving(FakeServer(fail=4)) as url:
        traces = asyncio.run(run_closed_loop(CompletionClient(url, "m"), make_uniform_job(12, 5, 3, 100), 2))
    errors = [trace.error for trace in traces if trace.error]
    assert len(errors) == 3 and "429" in errors[0] and "full" in errors[0]
    made = BenchReport("serve")
    add_latencies(made, traces)
    assert {"ttft_p50", "itl_p90", "e2e_p99"} <= set(made.results)


def test_nobody_there_is_an_error_of_the_request() -> None:
    traces = asyncio.run(
        run_closed_loop(CompletionClient("http://127.0.0.1:9/v1", "m"), make_uniform_job(2, 5, 3, 100), 1)
    )
    assert all(trace.error for trace in traces)


def test_leaving_early_closes_the_connection() -> None:
    server = FakeServer()
    with serving(server) as url:
        client = CompletionClient(url, "m")
        trace = asyncio.run(client.complete([1, 2], 500, disconnect_after_events=2))
        assert trace.abandoned and len(trace.event_times) == 2
        asyncio.run(CompletionClient(url, "m").complete([1, 2], 3))
    assert server.connections == 2


def test_plain_sends_what_every_server_knows() -> None:
    server = FakeServer()
    with serving(server) as url:
        asyncio.run(CompletionClient(url, "m", only_standard_fields=True).complete([1] * 30, 2))
        asyncio.run(CompletionClient(url, "m", chat=True, only_standard_fields=True).complete([1] * 30, 2))
    text, chat = server.bodies
    assert isinstance(text["prompt"], str) and "ignore_eos" not in text
    assert chat["messages"][0]["role"] == "user" and "prompt" not in chat


def test_a_listening_process_is_found_by_its_port() -> None:
    with serving(FakeServer()) as url:
        pids = find_local_processes(url)
        used = processes.read_usage(pids["server"])
    assert used is not None and used.rss > 1e6 and used.cpu > 0
    assert find_local_processes("http://example.invalid:80/v1") == {}


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(("leaked", "fail", "status"), [(0, 0, 0), (2, 0, 1), (0, 5, 1)])
def test_a_soak_tells_leaks_and_errors(
    tmp_path: Path, leaked: int, fail: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(FakeServer(fail=fail, leaked=leaked)) as url:
        words = ("soak", "--url", url, "--streams", "4", "--seconds", "1", "--abandon", "0.3")
        assert command.run(parse(*words, "--json", str(tmp_path / "r"))) == status
    results = json.loads((tmp_path / "r").read_text())["results"]
    assert results["leaked"]["value"] == leaked
    assert (results["errors"]["value"] > 0) == (fail > 0)
    assert results["completed"]["value"] > 0 and results["abandoned"]["value"] > 0
    assert results["server_rss"]["value"] > 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bench"] == "soak"


def test_serve_reports_what_was_asked_of_it(tmp_path: Path) -> None:
    with serving(FakeServer()) as url:
        words = ("serve", "--url", url, "--requests", "6", "--concurrency", "2", "--output-len", "4")
        assert command.run(parse(*words, "--json", str(tmp_path / "r"))) == 0
    whole = json.loads((tmp_path / "r").read_text())
    assert whole["results"]["errors"]["value"] == 0 and whole["results"]["output"]["value"] > 0
    assert whole["config"]["concurrency"] == 2


@pytest.mark.parametrize("what", [("serve", "--concurrency", "1"), ("soak", "--seconds", "1")])
def test_a_server_that_is_not_there_is_an_error_before_any_load(what: tuple[str, ...]) -> None:
    with pytest.raises(EngineUnavailable, match=r"no server answers at http://127.0.0.1:9/v1.*emberline serve"):
        command.run(parse(*what, "--url", "http://127.0.0.1:9/v1"))


def test_a_model_that_is_not_there_is_an_error_before_any_load() -> None:
    server = FakeServer()
    with serving(server) as url, pytest.raises(ModelNotFound, match=r"the model 'nope'.*--model: smollm2"):
        command.run(parse("serve", "--url", url, "--model", "nope", "--concurrency", "1"))
    assert not server.bodies
