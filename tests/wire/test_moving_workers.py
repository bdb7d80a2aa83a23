"""Real workers, asked as a router asks them: a reply goes on at another to the byte, and a prompt computed by one is
answered by another, whose blocks are cut differently."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from routers import get, spawn, start_router, stop, tiny_model, until
from tracked_streams import envelope, events_of, groups_of, name_of

from emberline.core.freeport import free_port

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TRACKED = {"x-emberline-track": "1", "x-emberline-seed": "7", "x-emberline-created": "1700000000"}
NEW = (None, 1700000000)  # a reply that has no id yet
DATED = "{{ strftime_now('%f') }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
STORY = "once upon a time there was a cache of keys and values, " * 5
WORKERS = {"prefill": ("prefill", "16"), "decode": ("decode", "32")}  # role and block size


class Workers:
    def __init__(self, home: Path) -> None:
        self.router = start_router(home / "router.log")
        self.urls = {name: f"http://127.0.0.1:{free_port()}" for name in WORKERS}
        self.processes: list[subprocess.Popen[bytes]] = []
        model = tiny_model(home / "tiny")
        (model / "chat_template.jinja").write_text(DATED)  # wherever it is read twice it is another prompt
        settings = ("--served-name", "tiny", "--embedder", "none", "--threads", "1", "--kv-memory", "16M")
        for name, (role, block) in WORKERS.items():
            command = ("-m", "emberline.cli", "worker", str(model), "--router", self.router.url, "--worker-name", name)
            place = ("--port", self.urls[name].rpartition(":")[2], "--role", role, "--block-size", block)
            self.processes.append(spawn(home / f"{name}.log", *command, *settings, *place))
        until(lambda: len(self.rows()) == 2 and all(row["health"] == "ready" for row in self.rows().values()), 120)
        until(lambda: self.rows()["decode"]["paired"] == ["prefill"])
        assert self.rows()["decode"]["ranks"] == {"tiny": 1}

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in get(f"{self.router.url}/cluster/status")["workers"]}

    def ask(self, name: str, path: str, body: Any, headers: dict[str, str] | None = None) -> bytes:
        given = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.urls[name] + path, json.dumps(body).encode(), given)
        with urllib.request.urlopen(request, timeout=30) as reply:
            told: bytes = reply.read()
        return told

    def transfer(self, name: str) -> dict[str, Any]:
        told: dict[str, Any] = get(f"{self.urls[name]}/stats")["transfer"]
        return told


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    made = Workers(tmp_path_factory.mktemp("moving"))
    yield made
    stop(*made.processes, made.router.process)


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": STORY}], "max_tokens": 14}),
    "greedy": (TEXT, {"prompt": "a", "max_tokens": 9, "temperature": 0}),
    "penalties": (TEXT, {"prompt": STORY, "max_tokens": 14, "frequency_penalty": 1.5, "repetition_penalty": 1.3}),
    "several": (TEXT, {"prompt": STORY, "max_tokens": 6, "n": 2, "min_tokens": 4}),
    "logprobs": (TEXT, {"prompt": STORY, "max_tokens": 9, "logprobs": 3}),
    "echo": (TEXT, {"prompt": "abc", "max_tokens": 5, "n": 2, "echo": True, "logprobs": 1}),
    "grammar": (CHAT, {"messages": [{"role": "user", "content": "?"}], "response_format": {"type": "json_schema",
                "json_schema": {"name": "x", "schema": {"enum": ["yes, I think so", "no, never"]}}}}),
}  # fmt: skip
ALWAYS = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("case", BODIES)
def test_reply_continues_at_other_worker(workers: Workers, case: str) -> None:
    path, body = BODIES[case]
    body = ALWAYS | body
    whole = groups_of(workers.ask("prefill", path, body, TRACKED))
    assert len(whole) > 5
    name = name_of(events_of(whole))
    for cut in (0, 1, 2, len(whole) // 2, len(whole) - 3, len(whole) - 2, len(whole) - 1):
        again = workers.ask("decode", "/cluster/resume", envelope(path, body, whole[:cut], name))
        rest = sorted(whole[cut:], key=lambda group: (not group.said.tokens, group.said.index))
        made = sorted(groups_of(again), key=lambda group: (not group.said.tokens, group.said.index))
        assert [group.said for group in made] == [group.said for group in rest], cut
        if cut and "n" not in body:  # where running totals depend on who comes first
            assert events_of(made) == events_of(rest), cut


def test_prefilled_prompt_is_answered_by_other_worker(workers: Workers) -> None:
    path, body = CHAT, ALWAYS | {"messages": [{"role": "user", "content": "here: " + STORY}], "max_tokens": 14}
    before = workers.transfer("decode")
    lines = workers.ask("prefill", "/cluster/prefill", envelope(path, body, (), NEW)).splitlines()
    told: dict[str, Any] = {}
    for line in lines:
        told |= json.loads(line)
    assert list(told) == ["ticket", "done"] and told["done"]["cached"] == 0
    split = groups_of(workers.ask("decode", "/cluster/resume", envelope(path, body, (), NEW, told["ticket"])))
    assert split[0].said.tokens == (told["done"]["token"],) and split[0].cached == 0
    after = until(lambda: (s := workers.transfer("decode"))["pulls"] > before["pulls"] and s)
    assert after["hit_tokens"] - before["hit_tokens"] >= 256 and not after["pull_failures"]
    until(lambda: workers.transfer("prefill")["leases"] == 0)
    alone = groups_of(workers.ask("prefill", path, body, TRACKED))
    assert [group.said for group in split] == [group.said for group in alone]


def test_resuming_worker_fetches_prompt_blocks(workers: Workers) -> None:
    path, body = CHAT, ALWAYS | {"messages": [{"role": "user", "content": "again: " + STORY}], "max_tokens": 14}
    whole = groups_of(workers.ask("prefill", path, body, TRACKED))
    before = workers.transfer("decode")["hit_tokens"]
    lines = workers.ask("prefill", "/cluster/prefill", envelope(path, body, (), NEW)).splitlines()
    asked = envelope(path, body, whole[:6], name_of(events_of(whole)), json.loads(lines[0])["ticket"])
    assert events_of(groups_of(workers.ask("decode", "/cluster/resume", asked))) == events_of(whole[6:])
    assert until(lambda: workers.transfer("decode")["hit_tokens"]) - before >= 256
    until(lambda: workers.transfer("prefill")["leases"] == 0)


def test_resuming_worker_fetches_output_blocks(workers: Workers) -> None:
    """Without them a stream that moves after 500 tokens pauses until 500 tokens are computed again."""
    body = ALWAYS | {"messages": [{"role": "user", "content": "and again: " + STORY}], "max_tokens": 90}
    body |= {"ignore_eos": True}
    whole = groups_of(workers.ask("prefill", CHAT, body, TRACKED))
    prompt = json.loads(events_of(whole).split(b"data: ")[-2])["usage"]["prompt_tokens"]
    before, cut = workers.transfer("decode")["hit_tokens"], 70
    lines = workers.ask("prefill", "/cluster/prefill", envelope(CHAT, body, whole[:cut], NEW)).splitlines()
    ticket = json.loads(lines[0])["ticket"]
    asked = envelope(CHAT, body, whole[:cut], name_of(events_of(whole)), ticket)
    made = groups_of(workers.ask("decode", "/cluster/resume", asked))
    assert events_of(made) == events_of(whole[cut:])
    said = sum(len(group.said.tokens) for group in whole[:cut])
    assert workers.transfer("decode")["hit_tokens"] - before > prompt + said - 32
    until(lambda: workers.transfer("prefill")["leases"] == 0)


def test_invalid_ticket_only_costs_time(workers: Workers) -> None:
    path, body = TEXT, ALWAYS | {"prompt": "void: " + STORY, "max_tokens": 8}
    lines = workers.ask("prefill", "/cluster/prefill", envelope(path, body, (), NEW)).splitlines()
    ticket = json.loads(lines[0])["ticket"] | {"id": "nobody knows"}
    split = groups_of(workers.ask("decode", "/cluster/resume", envelope(path, body, (), NEW, ticket)))
    alone = groups_of(workers.ask("prefill", path, body, TRACKED))
    assert [group.said for group in split] == [group.said for group in alone]
    assert until(lambda: workers.transfer("decode")["recomputed"])
