"""`emberline gateway` with only the local engine: real clients and a real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from routers import get, spawn, stop, until
from servers import Server

from emberline.core.freeport import free_port

MODEL = "smollm2"
GREEDY = {"temperature": 0}
FRANCE: Any = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture(scope="module")
def gateway(running: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("gateway")
    port = free_port()
    options = ("--port", str(port), "--engine", running.url, "--store", f"sqlite:{home / 'store'}")
    process = spawn(home / "log", "-m", "emberline.cli", "gateway", *options)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: get(f"{url}/health/ready"))
        yield url
    finally:
        stop(process)
    assert "Traceback" not in Path(home / "log").read_text()


def test_chat(gateway: str, server: str) -> None:
    through = openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0)
    direct = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    answer = [
        c.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=12, temperature=0).choices[0].message.content
        for c in (through, direct)
    ]
    assert answer[0] == answer[1] and "Paris" in str(answer[0])
    with through.chat.completions.create(
        model=MODEL, messages=FRANCE, max_tokens=12, temperature=0, stream=True
    ) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer[0]
    assert MODEL in [model.id for model in through.models.list()]
    assert through.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        through.chat.completions.create(model="no-such-model", messages=FRANCE)
    assert caught.value.code == "model_not_found", "the engine's own message"


def test_responses_and_embeddings(gateway: str) -> None:
    client = openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0)
    reply = client.responses.create(
        model=MODEL, input="Name the capital of France.", max_output_tokens=12, temperature=0
    )
    assert "Paris" in reply.output_text
    vectors = client.embeddings.create(model="minilm", input=["a cat", "a dog"]).data
    assert [len(vector.embedding) for vector in vectors] == [384, 384]


def test_messages_and_tools(gateway: str) -> None:
    client = anthropic.Anthropic(base_url=gateway, api_key="none", max_retries=0)
    with client.messages.stream(model=MODEL, messages=FRANCE, max_tokens=12, extra_body=GREEDY) as stream:
        assert "Paris" in "".join(stream.text_stream)
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tools: Any = [{"name": "weather", "description": "of a city", "input_schema": schema}]
    choice: Any = {"type": "tool", "name": "weather"}
    reply = client.messages.create(
        model=MODEL, messages=FRANCE, max_tokens=40, tools=tools, tool_choice=choice, extra_body=GREEDY
    )
    used = [block for block in reply.content if block.type == "tool_use"]
    assert (
        reply.stop_reason == "tool_use"
        and isinstance(used[0].input, dict)
        and used[0].input["city"] in ("Paris", "Rome")
    )
    counted = client.messages.count_tokens(model=MODEL, messages=FRANCE)
    assert counted.input_tokens > 5


def test_examples_of_cloudflares_docs_work(gateway: str) -> None:
    """Send the HTTP requests of Cloudflare's documentation, with this gateway's names."""
    compat = {"model": f"emberline/{MODEL}", "messages": FRANCE, "max_tokens": 12, **GREEDY}
    assert (
        "Paris"
        in get(f"{gateway}/v1/default/default/compat/chat/completions", compat)["choices"][0]["message"]["content"]
    )
    steps = [
        {
            "provider": "openai",
            "endpoint": "chat/completions",
            "headers": {},
            "query": {"model": "gpt", "messages": FRANCE},
        },
        {
            "provider": "emberline",
            "endpoint": "v1/chat/completions",
            "headers": {"Content-Type": "application/json"},
            "query": {"model": MODEL, "messages": FRANCE, "max_tokens": 12, **GREEDY},
        },
    ]
    assert "Paris" in get(f"{gateway}/v1/default/default", steps)["choices"][0]["message"]["content"]
