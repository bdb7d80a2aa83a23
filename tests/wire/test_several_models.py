"""Several models behind one server, through the real clients: each with its own words, limits and metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import bytelevel
import openai
import pytest
import sample_tokenizers
import tiny
from servers import SRC, Server, start_server, stop_server

HELLO: Any = [{"role": "user", "content": "hello"}]


def write(home: Path, kind: str, context: int, seed: int) -> Path:
    """A model whose template says which one it is; the two kinds have different tokenizers too."""
    made = bytelevel.build() if kind == "llama" else sample_tokenizers.byte_level()
    end = made.token_to_id("<|end|>")
    sizes = {"vocab_size": made.get_vocab_size(), "eos_token_id": end, "max_position_embeddings": context}
    tiny.write(home, tiny.config(kind, **sizes), seed=seed)
    made.save(str(home / "tokenizer.json"))
    template = "{% for m in messages %}" + kind + ": {{ m.content }}\n{% endfor %}"
    (home / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    return home


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"one": write(root / "one", "llama", 512, 1), "two": write(root / "two", "qwen3", 256, 2)}


@pytest.fixture(scope="module", params=["awake", "taking turns"])
def server_with_models(
    request: Any, tmp_path_factory: pytest.TempPathFactory, model_dirs: dict[str, Path]
) -> Iterator[Server]:
    program = (
        ("-m", "emberline.cli")
        if request.param == "awake"
        else (str(Path(__file__).parents[1] / "sleeping_server.py"),)
    )
    models = ",".join(f"{name}={home}" for name, home in model_dirs.items())
    log = tmp_path_factory.mktemp("server") / "log"
    started = start_server(log, "--models", models, "--embedder", "none", "--model-turn", "0.3", program=program)
    yield started
    stop_server(started)


@pytest.fixture
def client(server_with_models: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server_with_models.url}/v1", api_key="none", max_retries=0, timeout=60)


def get(server: Server, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        text = reply.read().decode()
    return json.loads(text) if "json" in reply.headers["content-type"] else text


def metric(server: Server, name: str, model: str) -> float:
    found = re.search(rf'^{name}\{{model_name="{model}"\}} (\S+)$', get(server, "/metrics"), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def chat(client: openai.OpenAI, model: str, seed: int = 0) -> str:
    reply = client.chat.completions.create(model=model, messages=HELLO, max_tokens=12, seed=seed, logprobs=True)
    assert reply.model == model and reply.choices[0].logprobs is not None
    return json.dumps([token.bytes for token in reply.choices[0].logprobs.content or []])


def test_models_are_listed_with_their_limits(client: openai.OpenAI) -> None:
    listed = {model.id: model.model_dump()["max_model_len"] for model in client.models.list()}
    assert listed == {"one": 512, "two": 256} and client.models.retrieve("two").id == "two"
    text = "x" * 300
    client.completions.create(model="one", prompt=text, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256"):
        client.completions.create(model="two", prompt=text, max_tokens=1)


def test_each_model_has_its_template_and_tokenizer(server_with_models: Server) -> None:
    prompts = {}
    for model in ("one", "two"):
        got = get(server_with_models, "/tokenize", {"model": model, "messages": HELLO, "return_token_strs": True})
        prompts[model] = "".join(got["token_strs"])
        back = get(server_with_models, "/detokenize", {"model": model, "tokens": got["tokens"]})
        assert back["prompt"] == prompts[model]
    assert prompts == {"one": "llama: hello\n", "two": "qwen3: hello\n"}
    counts = [
        get(server_with_models, "/tokenize", {"model": model, "prompt": " the"})["count"] for model in ("one", "two")
    ]
    assert counts == [4, 1]
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(server_with_models, "/tokenize", {"prompt": "x"})
    error = json.loads(raised.value.read())["error"]
    assert raised.value.code == 400 and error["param"] == "model" and "'one', 'two'" in error["message"]


def test_concurrent_replies_equal_sequential_ones(client: openai.OpenAI) -> None:
    asked = [(model, seed) for seed in range(6) for model in ("one", "two")]
    expected = {one: chat(client, *one) for one in asked}
    assert len(set(expected.values())) == len(expected)
    with ThreadPoolExecutor(len(asked)) as threads:
        assert dict(zip(asked, threads.map(lambda one: chat(client, *one), asked), strict=True)) == expected


def test_every_protocol_selects_model(server_with_models: Server, client: openai.OpenAI) -> None:
    claude = anthropic.Anthropic(base_url=server_with_models.url, api_key="none", max_retries=0, timeout=60)
    for model in ("two", "one"):
        before = metric(server_with_models, "vllm:generation_tokens_total", model)
        steps = metric(server_with_models, "vllm:iteration_tokens_total_count", model)
        said = claude.messages.create(model=model, messages=HELLO, max_tokens=3, extra_body={"temperature": 0})
        assert said.model == model
        assert claude.messages.count_tokens(model=model, messages=HELLO).input_tokens > 5
        asked = client.responses.create(model=model, input="hello", max_output_tokens=16, temperature=0)
        assert asked.model == model
        text = {"prompt": "hello", "max_tokens": 4, "temperature": 0}  # drawn at random, some would end at once
        chunks = list(client.completions.create(model=model, stream=True, **text))
        assert {chunk.model for chunk in chunks} == {model}
        assert metric(server_with_models, "vllm:generation_tokens_total", model) - before >= 8
        assert metric(server_with_models, "vllm:iteration_tokens_total_count", model) - steps >= 8


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages", "messages/count_tokens"])
def test_unknown_model_error_lists_models(server_with_models: Server, path: str) -> None:
    asked = {"prompt": "x"} if path == "completions" else {"input": "x"} if path == "responses" else {"messages": HELLO}
    limit = {"max_tokens": 1} if path in ("messages", "chat/completions", "completions") else {}
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(server_with_models, f"/v1/{path}", {"model": "three", **asked, **limit})
    message = json.loads(raised.value.read())["error"]["message"]
    assert raised.value.code == 404 and "'three'" in message and "'one', 'two'" in message


def test_metrics_and_health_show_awake_models(request: Any, server_with_models: Server, client: openai.OpenAI) -> None:
    turns = "taking turns" in request.node.name
    for model, other in (("one", "two"), ("two", "one"), ("one", "two")):
        wakes = metric(server_with_models, "emberline:model_wakes_total", model)
        asleep = get(server_with_models, "/health")["models"][model] == "asleep"
        chat(client, model)
        assert get(server_with_models, "/health")["models"] == {model: "awake", other: "asleep" if turns else "awake"}
        assert metric(server_with_models, "emberline:model_awake", model) == 1
        assert metric(server_with_models, "emberline:model_awake", other) == (0 if turns else 1)
        assert metric(server_with_models, "emberline:model_wakes_total", model) == wakes + asleep
    if turns:
        assert metric(server_with_models, "emberline:model_sleep_bytes_total", "one") > 0
        assert metric(server_with_models, "emberline:model_wake_seconds_total", "two") > 0
    else:
        assert metric(server_with_models, "emberline:model_sleeps_total", "one") == 0
    assert get(server_with_models, "/stats")["blocks_total"] == sum(
        metric(server_with_models, "emberline:kv_blocks", m) for m in ("one", "two")
    )


def test_restarted_engine_serves_all_models(server_with_models: Server, client: openai.OpenAI) -> None:
    children = (
        Path(f"/proc/{server_with_models.process.pid}/task/{server_with_models.process.pid}/children")
        .read_text()
        .split()
    )
    found = [
        c for c in children if re.search(rb"engine.process|sleeping_server", Path(f"/proc/{c}/cmdline").read_bytes())
    ]
    assert len(found) == 1, "one process holds all models"
    expected = {model: chat(client, model) for model in ("one", "two")}
    subprocess.run(["kill", "-9", found[0]], check=True)
    deadline = time.monotonic() + 90
    while True:
        try:
            assert {model: chat(client, model) for model in expected} == expected
            break
        except openai.APIStatusError as e:
            assert e.status_code in (500, 503) and time.monotonic() < deadline
            time.sleep(0.2)
    assert get(server_with_models, "/health")["engine_restarts"] == 1


@pytest.fixture(scope="module")
def server_with_failing_model(
    tmp_path_factory: pytest.TempPathFactory, model_dirs: dict[str, Path]
) -> Iterator[Server]:
    """Takes turns, with little patience; the second model never wakes again."""
    models = f"one={model_dirs['one']},broken={model_dirs['two']},two={model_dirs['two']}"
    log = tmp_path_factory.mktemp("troubled") / "log"
    settings = ("--embedder", "none", "--model-turn", "2.5", "--model-wait", "0.05")
    program = (str(Path(__file__).parents[1] / "sleeping_server.py"),)
    started = start_server(log, "--models", models, *settings, program=program)
    yield started
    stop_server(started)


def test_model_that_cannot_load_fails_alone(server_with_failing_model: Server) -> None:
    client = openai.OpenAI(base_url=f"{server_with_failing_model.url}/v1", api_key="none", max_retries=0, timeout=60)
    expected = chat(client, "one")
    with pytest.raises(openai.InternalServerError, match="waking the model 'broken' failed") as raised:
        chat(client, "broken")
    assert raised.value.status_code == 503 and int(raised.value.response.headers["retry-after"]) >= 1
    assert chat(client, "one") == expected and chat(client, "two")
    assert get(server_with_failing_model, "/health")["engine_restarts"] == 0


def test_busy_models_return_429_with_retry_after(server_with_failing_model: Server) -> None:
    client = openai.OpenAI(base_url=f"{server_with_failing_model.url}/v1", api_key="none", max_retries=0, timeout=60)
    long: Any = {"model": "one", "prompt": "x", "max_tokens": 500, "extra_body": {"ignore_eos": True}}
    with client.completions.create(**long, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="busy") as raised:
            chat(client, "two")
        assert raised.value.response.headers["retry-after"] == "3"
    patient = client.with_options(max_retries=20)
    assert chat(patient, "two")  # who left is in nobody's way, once the server has noticed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--models", "a=x,a=y"], "'a' twice"),
        (["--models", "a=x,"], "which names no model"),
        (["smollm2", "--models", "a=x"], "cannot be combined with MODEL 'smollm2'"),
        (["--models", "a=x", "--served-name", "b"], "cannot be combined with --served-name 'b'"),
        (["--models", "minilm=x,b=y"], "the embedder"),
        (["--models", "a=x,b=y", "--chat-template", "t.jinja"], "chat_template"),
        (["--models", "a=x,b=/nowhere/at=all"], "no model"),
        (["--models", "a=x", "--model-wait", "0"], "wait is 0.0; it must be above 0"),
    ],
)
def test_invalid_models_option_is_reported(arguments: list[str], says: str) -> None:
    command = [sys.executable, "-m", "emberline.cli", "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(SRC)})
    assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr, done.stderr
