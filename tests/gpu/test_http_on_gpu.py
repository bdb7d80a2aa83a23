"""`emberline serve` on a GPU as a user runs it: the same text as a CPU gives, many at once, and nothing left behind."""

from __future__ import annotations

import importlib.util
import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="needs what a server needs"),
]

OUT, MANY = 48, 48


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import bytelevel
    import tiny

    directory, made = tmp_path_factory.mktemp("model"), bytelevel.build()
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
    rest = {"vocab_size": made.get_vocab_size(), "eos_token_id": 0, "max_position_embeddings": 4096}
    tiny.write(directory, tiny.config("llama", **sizes, **rest), seed=1)
    made.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


@pytest.fixture(scope="module", params=[("float32", "plain"), ("bfloat16", "packed")], ids=lambda p: p[0])
def gpu_server(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    from servers import start_server, stop_server

    dtype, weights = request.param
    log = tmp_path_factory.mktemp("log") / "serve.log"
    options = ("--device", "cuda", "--dtype", dtype, "--weights", weights, "--kv-memory", "1G", "--served-name", "m")
    server = start_server(log, str(model_dir), *options)
    yield server.url, dtype
    stop_server(server)
    assert "Traceback" not in log.read_text()


def prompts() -> list[str]:
    return [f"number {i}: " + "the cat sat on the mat, " * (1 + 7 * i % 60) for i in range(MANY)]


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


def complete(url: str, prompt: str) -> str:
    body = {"model": "m", "prompt": prompt, "max_tokens": OUT, "temperature": 0, "ignore_eos": True}
    with post(url, "/v1/completions", body) as reply:
        answer = json.load(reply)
    assert answer["usage"]["completion_tokens"] == OUT
    return str(answer["choices"][0]["text"])


def stream_text(url: str, prompt: str) -> str:
    body = {"model": "m", "prompt": prompt, "max_tokens": OUT, "temperature": 0, "ignore_eos": True, "stream": True}
    with post(url, "/v1/completions", body) as reply:
        lines = [line.decode().removeprefix("data: ").strip() for line in reply if line.startswith(b"data: ")]
    assert lines[-1] == "[DONE]"
    return "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])


def test_gpu_generates_same_text_as_cpu(gpu_server: tuple[str, str], model_dir: Path) -> None:
    from emberline import LLM, SamplingParams

    url, dtype = gpu_server
    if dtype != "float32":
        pytest.skip("bf16 rounds where a CPU does not")
    params = SamplingParams(max_tokens=OUT, temperature=0.0, ignore_eos=True)
    said = LLM(str(model_dir), device="cpu", dtype="float32").generate(prompts()[:8], params)
    assert [complete(url, prompt) for prompt in prompts()[:8]] == [answer.text for answer in said]


def test_many_concurrent_streams(gpu_server: tuple[str, str]) -> None:
    url, dtype = gpu_server
    with ThreadPoolExecutor(MANY) as pool:
        texts = list(pool.map(lambda prompt: stream_text(url, prompt), prompts()))
    assert all(texts)
    if dtype == "float32":
        assert texts == [complete(url, prompt) for prompt in prompts()]


def test_chat_and_messages(gpu_server: tuple[str, str]) -> None:
    url, _ = gpu_server
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    with post(url, "/v1/chat/completions", body) as reply:
        assert json.load(reply)["choices"][0]["finish_reason"] in ("length", "stop")
    with post(url, "/v1/messages", body) as reply:
        assert json.load(reply)["stop_reason"] in ("max_tokens", "end_turn")


def test_disconnected_clients_leak_nothing(gpu_server: tuple[str, str]) -> None:
    url, _ = gpu_server
    body = {"model": "m", "prompt": "go on", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    for _ in range(8):
        with post(url, "/v1/completions", body) as reply:
            reply.readline()
    deadline = time.monotonic() + 20
    while gauge(url, "vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert gauge(url, "vllm:num_requests_running") == 0


def gauge(url: str, name: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=10) as reply:
        found = [line for line in reply.read().decode().splitlines() if line.split("{")[0].split(" ")[0] == name]
    assert found, f"no {name} there"
    return sum(float(line.rpartition(" ")[2]) for line in found)
