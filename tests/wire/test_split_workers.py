"""Real prefill and decode workers behind a router reply exactly like a single worker.

That holds for requests during which a worker dies as well."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from routers import get, spawn, start_router, stop, tiny_model, until
from servers import Server

from emberline.core.freeport import free_port

STORY = "Once upon a time there was a cache of keys and values that everybody wanted. "
TOKENS = 120
LONG: Any = {"model": "tiny", "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
ROLES = {"p": "prefill", "d": "decode", "e": "decode"}
OWN_OPTIONS = {"p": ("--kv-checksums",), "d": ("--speculate", "suffix")}
DRAFTING = Path(__file__).parents[1] / "drafting_server.py"


class Cluster:
    def __init__(self, home: Path, router: Server) -> None:
        self.home, self.router, self.url = home, router, router.url
        self.model = tiny_model(home / "tiny", 1024)
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.ports = {name: free_port() for name in ROLES}

    def start(self, *names: str) -> None:
        settings = ("--served-name", "tiny", "--embedder", "none", "--threads", "1", "--kv-memory", "32M")
        before = self.rows()
        for name in names:
            program = (str(DRAFTING),) if name == "d" else ("-m", "emberline.cli")
            command = (*program, "worker", str(self.model), "--router", self.url, "--worker-name", name)
            own = ("--role", ROLES[name], "--port", str(self.ports[name]), *OWN_OPTIONS.get(name, ()))
            self.workers[name] = spawn(self.home / f"{name}.log", *command, *settings, *own)
        old = {before[name]["incarnation"] for name in names if name in before}
        until(lambda: self.paired() and not old & {row["incarnation"] for row in self.rows().values()}, 120)

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in get(f"{self.url}/cluster/status")["workers"]}

    def paired(self) -> bool:
        rows = self.rows()
        if len(rows) < len(ROLES) or any(row["health"] != "ready" for row in rows.values()):
            return False
        return all(rows[name]["paired"] == ["p"] and rows[name]["breaker"] == "closed" for name in "de")

    def wait_until_idle(self) -> bool:
        """Nothing runs, nothing is held for anybody."""
        rows = self.rows().values()
        return not any(row["open"] or row["running"] or row["transfer"]["leases"] for row in rows if row["transfer"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("roles")
    router = start_router(
        home / "router.log",
        "--split-tokens",
        "32",
        "--split-patience",
        "60",
        "--lost-after",
        "3",
        "--ticket-timeout",
        "3",
    )
    made = Cluster(home, router)
    made.start(*ROLES)
    yield made
    stop(*made.workers.values(), router.process)


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    until(cluster.paired)
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60)


def long_prompt(number: int) -> str:
    return f"{number}. {STORY * 6}"


def single_worker_reply(cluster: Cluster, number: int) -> str:
    """What a worker says that computes the prompt by itself."""
    body = {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True, "prompt": long_prompt(number), "seed": number}
    return str(get(f"http://127.0.0.1:{cluster.ports['e']}/v1/completions", body)["choices"][0]["text"])


def read(client: openai.OpenAI, number: int, after: Callable[[str], None] | None = None) -> tuple[str, Any]:
    """What comes through the router; `after` happens when the first words are there, at the worker that says them."""
    raw = client.completions.with_raw_response.create(**LONG, prompt=long_prompt(number), seed=number, stream=True)
    text, finish = "", None
    for chunk in raw.parse():
        if not text and after is not None:
            after(raw.headers["x-emberline-worker"])
        text += chunk.choices[0].text
        finish = chunk.choices[0].finish_reason
    assert finish == "length"
    return text, raw.headers


def transfer(cluster: Cluster, name: str) -> dict[str, Any]:
    told: dict[str, Any] = get(f"http://127.0.0.1:{cluster.ports[name]}/stats")["transfer"]
    return told


def test_split_replies_equal_single_worker(cluster: Cluster, client: openai.OpenAI) -> None:
    for number in range(4):
        text, headers = read(client, number)
        assert headers["x-emberline-prefill"] == "p" and headers["x-emberline-worker"] in "de"
        took = {name: float(ms) for name, ms in re.findall(r"(\w+);dur=([0-9.]+)", headers["server-timing"])}
        assert took.keys() == {"queue", "prefill", "pull"} and took["prefill"] > 0
        assert text == single_worker_reply(cluster, number)
    whole = client.completions.create(**LONG, prompt=long_prompt(10), seed=10)
    assert whole.choices[0].text == single_worker_reply(cluster, 10) and whole.usage is not None
    assert whole.usage.prompt_tokens_details is None or not whole.usage.prompt_tokens_details.cached_tokens
    pulled = [transfer(cluster, name) for name in "de"]
    assert sum(each["hit_tokens"] for each in pulled) > 5 * 400 and not any(each["recomputed"] for each in pulled)
    assert sum(each["verified_blocks"] for each in pulled) == transfer(cluster, "p")["published_blocks"] > 0
    until(cluster.wait_until_idle)


def test_invalid_requests_are_refused_as_usual(cluster: Cluster, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="tiny", prompt=STORY * 40)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt=long_prompt(1), temperature=-1)
    until(cluster.wait_until_idle)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_decode_worker_death_moves_stream(cluster: Cluster, client: openai.OpenAI, sign: signal.Signals) -> None:
    number, victim = 20 + sign, ""
    expected = single_worker_reply(cluster, number)

    def strike(name: str) -> None:
        nonlocal victim
        victim = name
        os.kill(cluster.workers[name].pid, sign)

    try:
        assert read(client, number, strike)[0] == expected
    finally:
        wait_for_restart(cluster, victim, sign)
    until(cluster.wait_until_idle)


def test_death_in_a_run_of_accepted_drafts_keeps_the_tokens(cluster: Cluster, client: openai.OpenAI) -> None:
    """Worker d drafts, and e, on which the stream goes on, does not. Two allowed tokens make the text repetitive."""
    two_tokens = {"ignore_eos": True, "allowed_token_ids": [40, 41], "temperature": 0}
    body: Any = {"model": "tiny", "max_tokens": 400, "prompt": long_prompt(50)}
    expected = get(f"http://127.0.0.1:{cluster.ports['e']}/v1/completions", body | two_tokens)["choices"][0]["text"]
    usage: Any = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    accepted_by_d = 0
    for _ in range(20):
        raw = client.completions.with_raw_response.create(**body, **usage, extra_body=two_tokens, stream=True)
        text, accepted = "", 0
        for chunk in raw.parse():
            text += chunk.choices[0].text if chunk.choices else ""
            assert chunk.usage is not None and chunk.usage.completion_tokens_details is not None
            accepted = chunk.usage.completion_tokens_details.accepted_prediction_tokens or 0
            if accepted and not accepted_by_d:
                os.kill(cluster.workers["d"].pid, signal.SIGKILL)
                accepted_by_d = accepted
        assert text == expected
        if accepted_by_d:
            break
    assert accepted >= accepted_by_d > 0  # the usage has the drafts of both workers
    wait_for_restart(cluster, "d", signal.SIGKILL)
    until(cluster.wait_until_idle)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_prefill_worker_death_is_invisible(cluster: Cluster, client: openai.OpenAI, sign: signal.Signals) -> None:
    numbers = range(100 + 10 * sign, 106 + 10 * sign)
    expected = [single_worker_reply(cluster, number) for number in numbers]
    os.kill(cluster.workers["p"].pid, sign)
    try:
        assert [read(client, number)[0] for number in numbers] == expected
    finally:
        wait_for_restart(cluster, "p", sign)
    read(client, 1000 + sign)
    until(cluster.wait_until_idle)


def wait_for_restart(cluster: Cluster, name: str, sign: signal.Signals) -> None:
    if sign is signal.SIGSTOP:
        os.kill(cluster.workers[name].pid, signal.SIGCONT)
    else:
        cluster.workers[name].wait()
        cluster.start(name)
    until(cluster.paired)
