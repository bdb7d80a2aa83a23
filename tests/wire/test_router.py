"""Two real workers behind a router, through the real clients: as one server, also when one of them dies."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from routers import get, spawn, start_router, stop, tiny_model, until
from servers import Server

HELLO: Any = [{"role": "user", "content": "hello"}]
LONG: Any = {"model": "tiny", "prompt": "x", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
NAMES = ("one", "two")


class Pair:
    def __init__(self, home: Path, router: Server) -> None:
        self.home, self.router, self.url = home, router, router.url
        self.model = tiny_model(home / "tiny")
        self.workers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        settings = ("--served-name", "tiny", "--embedder", "none", "--threads", "1", "--kv-memory", "64M")
        before = self.incarnations()
        for name in names:
            command = ("-m", "emberline.cli", "worker", str(self.model), "--router", self.url, "--worker-name", name)
            self.workers[name] = spawn(self.home / f"{name}.log", *command, *settings)
        until(lambda: all(self.incarnations().get(name) not in (None, before.get(name)) for name in names), 120)

    def incarnations(self) -> dict[str, str]:
        """Of those that are ready."""
        return {row["name"]: row["incarnation"] for row in self.rows().values() if row["health"] == "ready"}

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in get(f"{self.url}/cluster/status")["workers"]}

    def wait_until_idle(self) -> bool:
        return not any(row["open"] or row["running"] for row in self.rows().values())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    home = tmp_path_factory.mktemp("pair")
    made = Pair(home, start_router(home / "router.log"))
    made.start(*NAMES)
    yield made
    stop(*made.workers.values(), made.router.process)


@pytest.fixture
def client(pair: Pair) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_openai_client_through_router(pair: Pair, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    options: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "seed": 1}
    whole = client.chat.completions.create(**options)
    stream = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content and whole.usage is not None
    assert stream[-1].usage is not None and stream[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert client.completions.create(model="tiny", prompt="a", max_tokens=3).choices[0].text is not None
    reply = client.responses.create(model="tiny", input="hello", max_output_tokens=16)
    kinds = [e.type for e in client.responses.create(model="tiny", input="hello", max_output_tokens=16, stream=True)]
    assert reply.id.startswith("resp_") and kinds[0] == "response.created" and kinds[-1].startswith("response.")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**options, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**{**options, "max_tokens": "many"})
    until(pair.wait_until_idle)


def test_anthropic_client_through_router(pair: Pair) -> None:
    client = anthropic.Anthropic(base_url=pair.url, api_key="none", max_retries=0, timeout=60)
    whole = client.messages.create(model="tiny", messages=HELLO, max_tokens=12, extra_body={"temperature": 0})
    with client.messages.stream(model="tiny", messages=HELLO, max_tokens=12, extra_body={"temperature": 0}) as stream:
        same = stream.get_final_message()
    assert [b.to_dict() for b in same.content] == [b.to_dict() for b in whole.content]
    assert client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens == whole.usage.input_tokens + (
        whole.usage.cache_read_input_tokens or 0
    )
    with pytest.raises(anthropic.NotFoundError, match="'tiny'"):
        client.messages.create(model="other", messages=HELLO, max_tokens=1)


def test_conversation_stays_with_cached_worker(pair: Pair, client: openai.OpenAI) -> None:
    """Without any header: each turn finds the blocks of the one before."""
    for talk in range(4):
        messages: Any = [{"role": "user", "content": f"{talk} is the number of this long conversation. " * 8}]
        workers, cached = set(), []
        for turn in range(3):
            raw = client.chat.completions.with_raw_response.create(model="tiny", messages=messages, max_tokens=2)
            workers.add(raw.headers["x-emberline-worker"])
            usage = raw.parse().usage
            assert usage is not None and usage.prompt_tokens_details is not None
            cached.append(usage.prompt_tokens_details.cached_tokens or 0)
            messages = [*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": f"more {turn}"}]
        assert len(workers) == 1 and min(cached[1:]) > 64, (workers, cached)
    assert get(f"{pair.url}/cluster/status")["decisions"]["prefix"] >= 8


def test_metrics_cover_both_workers(pair: Pair) -> None:
    text = get(f"{pair.url}/metrics")
    for name in NAMES:
        assert f'emberline:worker_ready{{worker="{name}"}} 1' in text
    assert 'emberline:router_requests_total{worker="' in text


def texts(client: openai.OpenAI, between: Callable[[], None] | None = None) -> list[str]:
    """Of four streams that are open at once; `between` happens while they are."""
    streams = [client.completions.create(**{**LONG, "prompt": f"{i}"}, seed=i, stream=True) for i in range(4)]
    begun = [next(iter(stream)).choices[0].text for stream in streams]
    if between is not None:
        between()
    rest = [list(stream) for stream in streams]
    assert [chunks[-1].choices[0].finish_reason for chunks in rest] == ["length"] * 4
    return [text + "".join(c.choices[0].text for c in chunks) for text, chunks in zip(begun, rest, strict=True)]


def migration_count(pair: Pair) -> int:
    return sum(m["count"] for m in get(f"{pair.url}/cluster/status")["migrations"] if m["outcome"] == "went on")


def test_worker_death_moves_stream_and_worker_returns(pair: Pair, client: openai.OpenAI) -> None:
    """Its streams go on at the other: no token is lost, repeated or changed."""
    unmoved = texts(client)
    victim = ""

    def kill() -> None:
        nonlocal victim
        victim = max(pair.rows().values(), key=lambda row: row["open"])["name"]
        pair.workers[victim].kill()
        pair.workers[victim].wait()

    assert texts(client, kill) == unmoved and migration_count(pair) >= 1
    for _ in range(6):  # before their first byte: nobody notices
        assert client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2).choices
    pair.start(victim)
    until(pair.wait_until_idle)
    raw = client.completions.with_raw_response
    replies = [raw.create(model="tiny", prompt=f"{i}" * 40, max_tokens=2) for i in range(12)]
    assert {reply.headers["x-emberline-worker"] for reply in replies} == set(NAMES)


def test_engine_death_is_invisible_to_client(pair: Pair, client: openai.OpenAI) -> None:
    before = migration_count(pair)

    def kill() -> None:
        name = max(pair.rows().values(), key=lambda row: row["open"])["name"]
        pid = pair.workers[name].pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        engine = next(c for c in children if b"engine.process" in Path(f"/proc/{c}/cmdline").read_bytes())
        subprocess.run(["kill", "-9", engine], check=True)

    assert texts(client, kill) == texts(client) and migration_count(pair) > before
    for i in range(10):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": f"{i}"}], max_tokens=2)
    until(lambda: len(pair.incarnations()) == 2)


def test_unreadable_body_is_refused(pair: Pair) -> None:
    import urllib.error
    import urllib.request

    for body, status in (
        (b"{", 400),
        (b"[]", 400),
        (json.dumps({"model": 5}).encode(), 400),
        (b'{"model": "tiny", "stream": "yes"', 400),
        (b'{"model": "tiny", "stream": "yes", "x": "\xff"}', 400),
    ):
        with pytest.raises(urllib.error.HTTPError, match=str(status)) as raised:
            urllib.request.urlopen(
                urllib.request.Request(f"{pair.url}/v1/chat/completions", body, {"content-type": "application/json"}),
                timeout=10,
            )
        assert json.loads(raised.value.read())["error"]["message"]
