"""Speculative decoding through the OpenAI client: the same text, with accepted tokens in usage and metrics."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bytelevel
import openai
import pytest
import tiny
from servers import Server, start_server, stop_server

from emberline.api.fields import IGNORED_FIELDS_HEADER

LETTERS = bytelevel.encode("abcdefghijklmnopqrstuvwxyz ")
QUESTION: Any = [{"role": "user", "content": "hello"}]
ASK: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 120, "seed": 5}
# Two letters in a greedy text repeat soon; a sampled text of all letters does not.
REPETITIVE = {"temperature": 0, "extra_body": {"allowed_token_ids": LETTERS[:2], "cache_salt": "repetitive"}}
VARIED = {"temperature": 1, "extra_body": {"allowed_token_ids": LETTERS, "cache_salt": "varied"}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": bytelevel.VOCAB_SIZE, "eos_token_id": bytelevel.EOS, "max_position_embeddings": 512}
    tiny.write(home, tiny.config("llama", **sizes))
    bytelevel.tokenizer_file(home)
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (home / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    return home


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[dict[str, Server]]:
    """A server for each value of --speculate. Drafts are always verified, however busy this machine is."""
    program = (str(Path(__file__).parents[1] / "drafting_server.py"),)
    started = {}
    try:
        for method in ("off", "suffix", "ngram"):
            log = tmp_path_factory.mktemp(method) / "log"
            arguments = ("--models", f"tiny={model_dir}", "--embedder", "none", "--speculate", method)
            started[method] = start_server(log, *arguments, program=program)
        yield started
    finally:
        for server in started.values():
            stop_server(server)


@pytest.fixture
def clients(servers: dict[str, Server]) -> dict[str, openai.OpenAI]:
    return {
        name: openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        for name, server in servers.items()
    }


def text_and_drafts(reply: Any) -> tuple[str, int, int]:
    """Return the text of a chat completion, and how many drafted tokens were accepted and rejected."""
    details = reply.usage.completion_tokens_details
    return reply.choices[0].message.content, details.accepted_prediction_tokens, details.rejected_prediction_tokens


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_repetitive_text_is_drafted_and_unchanged(clients: dict[str, openai.OpenAI], method: str) -> None:
    expected, accepted, rejected = text_and_drafts(clients["off"].chat.completions.create(**ASK, **REPETITIVE))
    assert len(expected) == 120 and (accepted, rejected) == (0, 0)
    text, accepted, _ = text_and_drafts(clients[method].chat.completions.create(**ASK, **REPETITIVE))
    assert text == expected and 0 < accepted < 120
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(clients[method].chat.completions.create(**ASK, **REPETITIVE, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 0


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_prediction_is_accepted_where_it_is_right(clients: dict[str, openai.OpenAI], method: str) -> None:
    expected, *_ = text_and_drafts(clients["off"].chat.completions.create(**ASK, **VARIED))
    assert len(set(expected)) > 10
    client = clients[method].chat.completions.with_raw_response
    edited = expected[:60] + "0123" + expected[60:]
    accepted_counts = {}
    for name, content in (
        ("right", expected),
        ("edited", [{"type": "text", "text": edited[:70]}, {"type": "text", "text": edited[70:]}]),
        ("wrong", "0123456789" * 12),
    ):
        body = {**VARIED["extra_body"], "cache_salt": name}  # a tenant without earlier outputs
        prediction: Any = {"type": "content", "content": content}
        raw = client.create(**ASK, temperature=1, extra_body=body, prediction=prediction)
        text, accepted_counts[name], _ = text_and_drafts(raw.parse())
        assert text == expected and IGNORED_FIELDS_HEADER not in raw.headers
    assert accepted_counts["right"] > 90 and accepted_counts["edited"] > 70 and accepted_counts["wrong"] < 20


def test_prediction_is_listed_as_ignored_without_speculation(clients: dict[str, openai.OpenAI]) -> None:
    client = clients["off"].chat.completions.with_raw_response
    raw = client.create(**ASK, **VARIED, prediction={"type": "content", "content": "x"})
    assert raw.headers[IGNORED_FIELDS_HEADER] == "prediction"


@pytest.mark.parametrize("method", ["off", "suffix"])
def test_wrong_prediction_is_rejected(clients: dict[str, openai.OpenAI], method: str) -> None:
    wrong: Any = {"type": "content", "content": 3}
    with pytest.raises(openai.BadRequestError) as caught:
        clients[method].chat.completions.create(**ASK, prediction=wrong)
    assert caught.value.param == "prediction.content"


def test_metrics_count_drafts_only_with_speculation(
    clients: dict[str, openai.OpenAI], servers: dict[str, Server]
) -> None:
    def metrics(method: str) -> dict[str, float]:
        clients[method].chat.completions.create(**ASK, **REPETITIVE)
        with urllib.request.urlopen(f"{servers[method].url}/metrics", timeout=30) as reply:
            rows = re.findall(r'^vllm:spec_decode_num_(\w+)\{.*?(\d*)"\} ([0-9.]+)$', reply.read().decode(), re.M)
        return {name + position: float(value) for name, position, value in rows}

    assert metrics("off") == {}
    found = metrics("suffix")
    per_position = [found[f"accepted_tokens_per_pos_total{i}"] for i in range(8)]
    assert 0 < found["accepted_tokens_total"] == sum(per_position) <= found["draft_tokens_total"]
    assert found["drafts_total"] >= per_position[0] and per_position == sorted(per_position, reverse=True)
