"""A router in front of vLLM and SGLang servers, scripted: split in their own dialects, and never left hanging."""

from __future__ import annotations

import http.client
import json
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from routers import get, start_router, stop, until
from scripted_servers import TICKET, WORDS, Rooms, Scripted

LONG = [{"role": "user", "content": "word " * 1000}]
BODY = {"model": "m", "messages": LONG, "max_tokens": 7, "stream_options": {"include_usage": True}, "odd": [1.0, None]}


@contextmanager
def start_router_with(home: Path, *servers: Scripted, more: tuple[str, ...] = ()) -> Iterator[str]:
    options = [word for server in servers for word in ("--foreign", server.option)]
    router = start_router(home / "router", "--migration-wait", "1", *options, *more)
    try:
        decoding = [server.name for server in servers if server.role == "decode"]
        until(lambda: all(rows(router.url).get(name, {}).get("paired") for name in decoding))
        yield router.url
    finally:
        stop(router.process)
        for server in servers:
            server.close()


def rows(url: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in get(f"{url}/cluster/status")["workers"]}


def has_no_model(url: str) -> bool:
    try:
        streamed_text(url, True)
    except urllib.error.HTTPError as e:
        return e.code == 404
    return False


def streamed_text(url: str, stream: bool, **more: Any) -> str:
    got = get(f"{url}/v1/chat/completions", {**BODY, "stream": stream, **more})
    if not stream:
        return str(got["choices"][0]["message"]["content"])
    assert got.endswith("data: [DONE]\n\n") and ":" not in [line[:1] for line in got.split("\n")]
    events = [json.loads(event[6:]) for event in got.split("\n\n")[:-2]]
    return "".join(event["choices"][0]["delta"]["content"] for event in events)


@pytest.mark.parametrize("stream", [True, False])
def test_vllm_prefill_and_decode(tmp_path: Path, stream: bool) -> None:
    p, d = Scripted("vllm", "prefill"), Scripted("vllm", "decode")
    with start_router_with(tmp_path, p, d) as url:
        assert streamed_text(url, stream) == "".join(WORDS)
        assert len(p.asked) == 1 and d.asked == [{**BODY, "stream": stream, "kv_transfer_params": TICKET}]
        short = [{"role": "user", "content": "hello"}]
        assert (
            streamed_text(url, stream, messages=short, kv_transfer_params=TICKET) == "".join(WORDS)
            and len(p.asked) == 1
        )
        assert "kv_transfer_params" not in d.asked[-1], "a client does not say where blocks are"
        p.fails = True
        other = [{"role": "user", "content": "other " * 1000}]
        assert streamed_text(url, stream, messages=other) == "".join(WORDS)
        assert len(p.asked) == 2 and "kv_transfer_params" not in d.asked[-1], "it computes by itself"
        assert get(f"{url}/cluster/status")["prefills"] == {"done": 1, "status 500": 1}


@pytest.mark.parametrize("stream", [True, False])
def test_sglang_prefill_and_decode(tmp_path: Path, stream: bool) -> None:
    rooms = Rooms()
    p, d = Scripted("sglang", "prefill", rooms), Scripted("sglang", "decode", rooms)
    with start_router_with(tmp_path, p, d) as url:
        for messages in (LONG, [{"role": "user", "content": "hello"}]):  # one that decodes cannot do without
            assert streamed_text(url, stream, messages=messages) == "".join(WORDS)
        assert len(rooms.there) == 2 and len(p.asked) == len(d.asked) == 2
        assert d.asked[-1]["bootstrap_port"] == 8998 and d.asked[-1]["odd"] == [1.0, None]


def test_sglang_prefill_failure_aborts_decode(tmp_path: Path) -> None:
    rooms = Rooms()
    p, d = Scripted("sglang", "prefill", rooms), Scripted("sglang", "decode", rooms)
    with start_router_with(tmp_path, p, d) as url:
        p.fails = True
        with pytest.raises(urllib.error.HTTPError, match="503") as raised:
            streamed_text(url, True)
        assert "prefill" in raised.value.read().decode()
        p.fails = False
        until(lambda: rows(url)[p.name]["breaker"] == rows(url)[d.name]["breaker"] == "closed")
        assert streamed_text(url, True) == "".join(WORDS)


def test_sglang_prefill_survives_client_disconnect(tmp_path: Path) -> None:
    rooms = Rooms()
    p, d = Scripted("sglang", "prefill", rooms), Scripted("sglang", "decode", rooms)
    d.fails = True
    with start_router_with(tmp_path, p, d) as url:
        d.fails = False
        with rooms.changed:  # nobody can enter
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps({**BODY, "stream": True}),
                {"content-type": "application/json"},
            )
            until(lambda: p.asked and d.asked)
            connection.close()
            until(lambda: rows(url)[d.name]["left"] == 1)
            assert rows(url)[p.name]["open"] == 1, "its leg goes on"
        until(lambda: p.ended == 1 and rows(url)[p.name]["answered"] == 1)


def test_foreign_server_returns_after_outage(tmp_path: Path) -> None:
    one = Scripted("vllm", "both")
    with start_router_with(tmp_path, one, more=("--lost-after", "2")) as url:
        until(lambda: one.name in rows(url))
        assert streamed_text(url, True) == "".join(WORDS)
        one.close()
        until(lambda: rows(url)[one.name]["health"] == "lost")
        again = Scripted("vllm", "both", port=one.port, model="another")
        until(lambda: rows(url)[one.name]["health"] == "ready")
        assert streamed_text(url, True, model="another") == "".join(WORDS) and len(again.asked) == 1
        until(lambda: has_no_model(url))  # a router that has just started still expects workers of any model
        again.close()
