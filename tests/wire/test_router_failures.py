"""A router with failing fake workers: requests are retried where possible and end exactly once."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from routers import SRC, Fakes, get, spawn, start_router, stop, until

from emberline.cluster.supervisor import Supervisor, build_processes
from emberline.core.freeport import free_port
from emberline.router.policy import rendezvous_hash
from emberline.server.listener import bind_listener

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Fakes]:
    made = Fakes(tmp_path, "--stuck-after", "2", "--lost-after", "2", "--migration-wait", "0")
    yield made
    made.close()


def chat(fakes: Fakes, tokens: int = 4, session: str = "", **more: Any) -> Any:
    headers = {"x-session-affinity": session} if session else {}
    return get(
        f"{fakes.url}/v1/chat/completions", {"model": "fake", "messages": HELLO, "max_tokens": tokens, **more}, headers
    )


def open_stream(
    fakes: Fakes, tokens: int, path: str = "/v1/chat/completions", session: str = ""
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(fakes.url.removeprefix("http://"), timeout=60)
    headers = {"x-session-affinity": session} if session else {}
    body = {"model": "fake", "messages": HELLO, "max_tokens": tokens, "stream": True}
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
    return connection, connection.getresponse()


def preferred_worker(fakes: Fakes, session: str) -> str:
    """The worker that answers this session."""
    connection, reply = open_stream(fakes, 1, session=session)
    reply.read()
    connection.close()
    return str(reply.headers["x-emberline-worker"])


def wait_until_idle(fakes: Fakes) -> bool:
    status = fakes.status()
    rows = status["workers"]
    return not status["open_requests"] and not any(r["open"] or r["prefill_tokens"] or r["decode_tokens"] for r in rows)


def test_replies_pass_byte_for_byte(fakes: Fakes) -> None:
    fakes.start("a")
    direct = f"http://127.0.0.1:{fakes.ports['a']}/v1/chat/completions"
    for stream in (False, True):
        body = {"model": "fake", "messages": HELLO, "max_tokens": 200, "stream": stream, "seed": 7, "uneven": True}
        assert get(direct, body) == get(f"{fakes.url}/v1/chat/completions", body)
    odd = {"authorization": "Bearer mine", "x-odd": "\xe4 value", "X-Emberline-Track": "1", "x-emberline-other": "1"}
    odd["x-emberline-tenant-salt"] = "a gateway's"
    get(f"{fakes.url}/v1/chat/completions", {"model": "fake", "messages": HELLO}, odd)
    seen = fakes.tell("a")["seen"][-1]
    assert seen["authorization"] == "Bearer mine" and seen["x-odd"] == "\xe4 value"
    assert seen["x-emberline-tenant-salt"] == odd["x-emberline-tenant-salt"]
    ours = {name for name in seen if name.startswith("x-emberline")} - {"x-emberline-tenant-salt"}
    assert ours == {"x-emberline-seed", "x-emberline-created", "x-emberline-tenant"}, "a client's are not passed on"
    assert seen["x-emberline-tenant"].startswith("presented "), "the router's own, of the key that the client sent"
    get(f"{fakes.url}/v1/chat/completions?beta=true&q=%20x", {"model": "fake", "messages": HELLO})
    assert fakes.tell("a")["seen"][-1]["?"] == "beta=true&q=%20x"
    assert wait_until_idle(fakes)


@pytest.mark.parametrize("mode", ["refuse", "full", "stopped"])
def test_failure_before_first_byte_tries_another_worker(fakes: Fakes, mode: str) -> None:
    fakes.start("a", "b")
    first = preferred_worker(fakes, "s")
    if mode == "stopped":
        fakes.workers[first].kill()
        fakes.workers[first].wait()
    else:
        fakes.tell(first, mode)
    for stream in (False, True):
        assert "word" in str(chat(fakes, session="s", stream=stream))
    reasons = fakes.status()["retries"]
    assert set(reasons) <= {"unreached", "broken", "status 503", "status 429"} and sum(reasons.values()) >= 1
    assert wait_until_idle(fakes)


def test_failing_worker_opens_breaker(fakes: Fakes) -> None:
    fakes.start("a", "b")
    first = preferred_worker(fakes, "s")
    fakes.tell(first, "refuse")
    asked = fakes.tell(first)["asked"]
    for _ in range(12):
        assert "word" in str(chat(fakes, session="s"))
    assert fakes.row(first)["breaker"] == "open" and fakes.tell(first)["asked"] - asked < 8
    fakes.tell(first, "well")
    until(lambda: preferred_worker(fakes, "s") == first)
    assert fakes.row(first)["breaker"] == "closed"


def refuse_unknown_model(fakes: Fakes) -> str:
    """Return the body of a 404. A router that has just started still expects workers of any model, and answers 503."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        chat(fakes, model="other")
    return raised.value.read().decode() if raised.value.code == 404 else ""


def test_last_error_is_passed_on_if_all_workers_fail(fakes: Fakes) -> None:
    with pytest.raises(urllib.error.HTTPError, match="503") as raised:
        chat(fakes)
    assert "no worker has registered" in raised.value.read().decode()
    fakes.start("a", "b")
    for name in ("a", "b"):
        fakes.tell(name, "full")
    with pytest.raises(urllib.error.HTTPError, match="429") as raised:
        chat(fakes)
    assert raised.value.headers["retry-after"] == "7" and "not now" in raised.value.read().decode()
    refused = until(lambda: refuse_unknown_model(fakes))
    assert "'fake'" in refused
    assert wait_until_idle(fakes)


def test_crashing_request_spares_last_worker(fakes: Fakes) -> None:
    """Before its first byte, each that is asked dies of it: the last is not risked, the client is told."""
    fakes.start("a", "b", "c")
    for name in fakes.workers:
        fakes.tell(name, "die", after=0, times=1)
    for _ in range(2):  # as clients do by themselves
        with pytest.raises(urllib.error.HTTPError, match="503") as raised:
            chat(fakes)
        assert "failed while serving this request" in raised.value.read().decode()
        until(lambda: len(wait_until_dead(fakes)) == 2)
    (left,) = fakes.workers.keys() - wait_until_dead(fakes)
    fakes.tell(left, "well")
    other: Any = [{"role": "user", "content": "who has done nothing goes anywhere"}]
    assert "word" in str(chat(fakes, messages=other))


def wait_until_dead(fakes: Fakes) -> set[str]:
    return {name for name, worker in fakes.workers.items() if worker.poll() is not None}


def test_request_crashes_at_most_three_workers(fakes: Fakes) -> None:
    """However many there are, in whatever role; its client is told so, and does not try again by itself."""
    fakes.start(*"abcdef")
    fakes.start("p", role="prefill")
    until(lambda: all(fakes.row(name)["paired"] == ["p"] for name in "abcdef"))
    client = openai.OpenAI(base_url=f"{fakes.url}/v1", api_key="none", max_retries=2)
    for count, stream in ((3, False), (6, True)):
        for name in fakes.workers.keys() - wait_until_dead(fakes):
            fakes.tell(name, "die", after=3 if stream else 0)
        prompt: Any = [{"role": "user", "content": f"{count} times " * 200}]
        with pytest.raises(openai.APIError, match="3 workers failed while serving this request") as raised:
            list(client.chat.completions.create(model="fake", messages=prompt, max_tokens=50, stream=stream))
        assert raised.value.code == "workers_broke"
        assert stream or isinstance(raised.value, openai.UnprocessableEntityError)
        until(lambda n=count: len(wait_until_dead(fakes)) == n and "p" in wait_until_dead(fakes))  # type: ignore[misc]


def test_shutdowns_do_not_make_request_suspect(fakes: Fakes) -> None:
    """All are stopped one after another under one long stream, which takes longer than they wait for it."""
    fakes.start(*"abcd", pace=0.005)
    connection, reply = open_stream(fakes, 400)
    got = reply.readline()
    for _ in range(3):
        until(lambda: sum(row["open"] for row in fakes.status()["workers"] if row["health"] == "ready") == 1)
        row = next(row for row in fakes.status()["workers"] if row["open"] and row["health"] == "ready")
        get(f"{fakes.url}/cluster/leave", {"name": row["name"], "incarnation": row["incarnation"]})
        fakes.workers[row["name"]].kill()
    got += reply.read()
    connection.close()
    assert b"error" not in got and got.endswith(b"data: [DONE]\n\n") and got.count(b"\n\n") == 403


def test_request_waits_for_unavailable_workers(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, "--migration-wait", "30")
    try:
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(chat, fakes)
            fakes.start("a")
            assert "word" in str(early.result(60)) and not fakes.status()["retries"]
        fakes.tell("a", "break", after=0, times=3)  # one worker thrice is not three workers
        assert "word" in str(chat(fakes))
        fakes.tell("a", "refuse", times=1)
        assert "word" in str(chat(fakes)), "its engine is back"
        assert fakes.status()["retries"] == {"broken": 3, "status 503": 1}
        fakes.start(*"bcde")
        second, third, *_, first = sorted("abcde", key=lambda name: rendezvous_hash("s", name))
        for name in (first, second, third):
            fakes.tell(name, "break", after=0, times=1)
        assert "word" in str(chat(fakes, session="s")), "three at once, and all are heard of again"
        assert fakes.status()["retries"]["broken"] == 6 and wait_until_idle(fakes)
    finally:
        fakes.close()


def test_innocent_suspect_is_answered(tmp_path: Path) -> None:
    """Two workers die while it is theirs, the third is all that is left: it waits until one is back."""
    fakes = Fakes(tmp_path, "--migration-wait", "30", "--lost-after", "2")
    try:
        fakes.start("a", "b", "c")
        second, last, first = sorted(
            "abc", key=lambda name: rendezvous_hash("s", name)
        )  # as the session is sent to them
        for name in (first, second):
            fakes.tell(name, "break", after=0, times=1)
        assert "word" in str(chat(fakes, session="s")), "they beat again: only connections broke"
        for name in (first, second):
            fakes.tell(name, "die", after=0)
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(chat, fakes, session="s")
            until(lambda: fakes.health(first) == fakes.health(second) == "lost")
            asked = fakes.tell(last)["asked"]
            fakes.start(second)
            assert "word" in str(reply.result(60))
        assert (
            asked <= 1
            and fakes.tell(second)["asked"] + fakes.tell(last)["asked"] == asked + 1
            and wait_until_idle(fakes)
        )
    finally:
        fakes.close()


def test_full_workers_return_429(fakes: Fakes) -> None:
    fakes.start("a", "b", pace=0.05, max_running=1)  # and as many may wait at each
    streams = [open_stream(fakes, 1000) for _ in range(4)]
    assert sorted(row["open"] for row in fakes.status()["workers"]) == [2, 2]
    client = openai.OpenAI(base_url=f"{fakes.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.RateLimitError, match="full") as raised:
        client.chat.completions.create(model="fake", messages=HELLO)
    assert int(raised.value.response.headers["retry-after"]) >= 1
    for connection, reply in streams:
        reply.close()
        connection.close()
    until(lambda: wait_until_idle(fakes))
    assert "word" in str(chat(fakes))


@pytest.mark.parametrize("how", ["break", "tear", "kill"])
def test_failure_after_first_byte_ends_stream_with_error(fakes: Fakes, how: str) -> None:
    fakes.start("a", pace=0.02)
    if how != "kill":
        fakes.tell("a", how)
    connection, reply = open_stream(fakes, 100_000)
    got = reply.readline()
    if how == "kill":
        fakes.workers["a"].kill()
    events = [event for event in (got + reply.read()).decode().split("\n\n") if event]
    connection.close()
    assert events[-1] == "data: [DONE]" and json.loads(events[-2][6:])["error"]["code"] == "worker_lost"
    assert all("word" in json.loads(event[6:])["choices"][0]["delta"]["content"] for event in events[:-2])
    assert fakes.status()["broken"] == 1 and wait_until_idle(fakes)


def test_error_event_of_each_protocol(fakes: Fakes) -> None:
    fakes.start("a")
    fakes.tell("a", "break")
    client = openai.OpenAI(base_url=f"{fakes.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIError, match="worker a was lost"):
        list(client.chat.completions.create(model="fake", messages=HELLO, stream=True))
    for path, kind in (("/v1/messages", "api_error"), ("/v1/responses", "worker_lost")):
        connection, reply = open_stream(fakes, 50, path)
        name, data = reply.read().decode().strip().split("\n\n")[-1].split("\n")
        connection.close()
        assert name == "event: error" and kind in data and json.loads(data[6:])["type"] == "error"
        fakes.tell("a", "well")  # closes the breaker again
        chat(fakes)
        fakes.tell("a", "break")
    claude = anthropic.Anthropic(base_url=fakes.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.APIStatusError, match="worker a was lost"):
        list(claude.messages.create(model="fake", messages=HELLO, max_tokens=50, stream=True))


def test_stuck_worker_is_abandoned(fakes: Fakes) -> None:
    fakes.start("a", "b")
    first = preferred_worker(fakes, "s")
    fakes.tell(first, "stall", after=0)
    assert "word" in str(chat(fakes, session="s"))  # elsewhere, once it is found stuck
    assert fakes.status()["retries"] == {"stuck": 1}
    until(lambda: fakes.tell(first)["gone"] == 1 and not fakes.tell(first)["running"])
    fakes.tell(first, "well")
    until(lambda: fakes.health(first) == "ready")


def test_frozen_worker_is_abandoned_and_returns(fakes: Fakes) -> None:
    fakes.start("a", "b", pace=0.02)
    first = preferred_worker(fakes, "s")
    connection, reply = open_stream(fakes, 200, session="s")
    got = reply.readline()
    os.kill(fakes.workers[first].pid, signal.SIGSTOP)
    try:
        assert "word" in str(chat(fakes, session="s"))
        got += reply.read()
        assert b"error" not in got and got.endswith(b"data: [DONE]\n\n") and got.count(b"\n\n") == 203
        assert fakes.status()["migrations"] == [{"reason": "lost", "outcome": "went on", "count": 1}]
    finally:
        os.kill(fakes.workers[first].pid, signal.SIGCONT)
    connection.close()
    until(lambda: fakes.health(first) == "ready")
    until(lambda: preferred_worker(fakes, "s") == first)


def test_client_disconnect_reaches_worker(fakes: Fakes) -> None:
    fakes.start("a", pace=0.02)
    for stream in (True, False, False, False):
        before = fakes.tell("a")["gone"]
        connection = http.client.HTTPConnection(fakes.url.removeprefix("http://"), timeout=60)
        body = {"model": "fake", "messages": HELLO, "max_tokens": 100_000, "stream": stream}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        until(lambda: fakes.tell("a")["running"] == 1)
        connection.close()
        until(lambda b=before: fakes.tell("a")["gone"] == b + 1)  # type: ignore[misc]
    until(lambda: wait_until_idle(fakes))
    assert fakes.row("a")["left"] == 4 and fakes.row("a")["breaker"] == "closed"


def test_slow_client_slows_worker(fakes: Fakes) -> None:
    fakes.start("a")
    total = 100_000  # events, about 16 MB
    connection, reply = open_stream(fakes, total)
    counts = [-1, 0]

    def settled() -> bool:
        counts.append(fakes.tell("a")["generated"])
        time.sleep(0.3)
        return counts[-1] == counts[-2] == counts[-3]

    until(settled)
    assert 0 < counts[-1] < total
    events = reply.read().count(b"\n\n")
    connection.close()
    assert events == total + 3 and wait_until_idle(fakes)


def test_draining_worker_finishes_and_gets_no_requests(fakes: Fakes) -> None:
    fakes.start("a", "b", pace=0.01)
    first = preferred_worker(fakes, "s")
    connection, reply = open_stream(fakes, 150, session="s")
    reply.readline()
    command = [sys.executable, "-m", "emberline.cli", "drain", first, "--router", fakes.url]
    drain = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(SRC)}, text=True)
    until(lambda: fakes.health(first) == "draining")
    asked = fakes.tell(first)["asked"]
    for _ in range(5):
        assert preferred_worker(fakes, "s") != first
    assert drain.poll() is None, "it waits for the open stream"
    assert reply.read().endswith(b"data: [DONE]\n\n")
    connection.close()
    told, _ = drain.communicate(timeout=30)
    assert drain.returncode == 0 and f"{first} is drained" in told and "1 open requests" in told
    assert fakes.tell(first)["asked"] == asked
    subprocess.run([*command, "--undo"], check=True, env={**os.environ, "PYTHONPATH": str(SRC)})
    assert preferred_worker(fakes, "s") == first
    unknown = subprocess.run([*command[:4], "nobody", *command[5:]], capture_output=True, text=True,
                             env={**os.environ, "PYTHONPATH": str(SRC)})  # fmt: skip
    assert unknown.returncode == 1 and "no worker is named 'nobody'" in unknown.stderr
    assert "Traceback" not in unknown.stderr


def test_duplicate_name_is_refused_while_first_lives(fakes: Fakes) -> None:
    fakes.start("a")
    incarnation, port = fakes.row("a")["incarnation"], free_port()
    command = ("-m", "emberline.cluster.fake", "--router", fakes.url, "--name", "a", "--port", str(port))
    second = spawn(fakes.home / "second", *command)
    try:
        until(lambda: "another worker named 'a' is alive at" in (fakes.home / "second").read_text())
        for _ in range(5):
            chat(fakes)
        assert get(f"http://127.0.0.1:{port}/fake")["asked"] == 0 and fakes.row("a")["incarnation"] == incarnation
        fakes.workers["a"].kill()
        until(lambda: fakes.row("a")["incarnation"] != incarnation and fakes.health("a") == "ready")
        chat(fakes)
        assert get(f"http://127.0.0.1:{port}/fake")["asked"] == 1
    finally:
        stop(second)


def test_rolling_restart_loses_no_request(fakes: Fakes) -> None:
    """A rolling restart under load: nobody notices."""
    fakes.start("a", "b", pace=0.005)
    with ThreadPoolExecutor(4) as pool:
        going = True

        def load() -> int:
            count = 0
            while going:
                got = chat(fakes, 20, stream=True)
                assert got.endswith("data: [DONE]\n\n") and "error" not in got
                count += 1
            return count

        loads = [pool.submit(load) for _ in range(4)]
        for name in ("a", "b"):
            old = fakes.workers[name]
            stop(old)
            fakes.start(name, pace=0.005)
        going = False
        assert all(each.result(60) > 0 for each in loads)
    assert wait_until_idle(fakes) and fakes.status()["broken"] == 0


def test_workers_register_with_restarted_router(fakes: Fakes) -> None:
    fakes.start("a", "b")
    port = int(fakes.url.rsplit(":", 1)[1])
    fakes.router.process.kill()
    fakes.router.process.wait()
    fakes.router = start_router(fakes.home / "router", port=port)
    until(lambda: fakes.health("a") == fakes.health("b") == "ready")
    assert "word" in str(chat(fakes))


def test_registration_needs_cluster_key(tmp_path: Path) -> None:
    router = start_router(tmp_path / "log", "--cluster-key", "secret", "--api-key", "clients")
    card = {"name": "x", "incarnation": "1", "url": "http://127.0.0.1:1", "models": [{"name": "m"}]}
    try:
        for headers in ({}, {"authorization": "Bearer clients"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                get(f"{router.url}/cluster/register", card, headers)
        get(f"{router.url}/cluster/register", card, {"authorization": "Bearer secret"})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(f"{router.url}/v1/models")
        models = get(f"{router.url}/v1/models", headers={"authorization": "Bearer clients"})
        assert [model["id"] for model in models["data"]] == ["m"]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            get(f"{router.url}/cluster/register", {**card, "url": "file:///x"}, {"authorization": "Bearer secret"})
        with pytest.raises(urllib.error.HTTPError, match="400"):
            get(f"{router.url}/cluster/register", {**card, "name": "a\r\nb: c"}, {"authorization": "Bearer secret"})
    finally:
        stop(router.process)


def test_web_page_cannot_register_worker(fakes: Fakes) -> None:
    card = {"name": "x", "incarnation": "1", "url": "http://127.0.0.1:1", "models": [{"name": "m"}]}
    with pytest.raises(urllib.error.HTTPError, match="403"):
        get(f"{fakes.url}/cluster/register", card, {"origin": "http://evil.example"})


def test_connections_survive_router_restart(tmp_path: Path) -> None:
    """As under `cluster up`: the supervisor keeps the socket, and starts the router again at once."""

    async def main() -> None:
        with bind_listener("127.0.0.1", 0) as listener:
            host, port = listener.getsockname()[:2]
            url, asked = f"http://{host}:{port}", ["--host", host, "--port", str(port)]
            router, *_ = build_processes(
                asked, {}, [], router_url=url, cluster_keys=("k",), log_dir=tmp_path, listen_fd=listener.fileno()
            )
            supervisor = Supervisor(lambda who, what: None)
            await supervisor.start(router)
            try:
                await asyncio.to_thread(until, lambda: get(f"{url}/health/live"))
                assert router.process is not None
                router.process.kill()
                await router.process.wait()
                answer = await asyncio.to_thread(get, f"{url}/health/live")  # it is not refused
                assert answer == {"status": "live"} and router.restarts == 1
            finally:
                await supervisor.stop()

    asyncio.run(main())
