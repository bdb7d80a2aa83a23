"""Compares small models as a default: 48 short questions at temperature 0, size, memory, start and speed.

python benchmarks/quality/model_quality.py smollm2 MODEL.gguf --json benchmarks/results/default-model.json

questions.json has 12 facts, 12 answers bound by a JSON schema, 12 tool calls, and 12 instructions,
six of which ask for a Python function. Code judges the answers: a fact is right if the answer has the
word, JSON and tool calls if they equal the expected ones (in texts, upper and lower case are equal), an
instruction if the whole answer matches, a function if its tests pass in a process of its own. The models
run one after the other, each in its own server.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from emberline.bench import report as reports
from emberline.bench.processes import find_process_tree, read_usage
from emberline.bench.server_launch import EmberlineServer

QUESTIONS_FILE = Path(__file__).with_name("questions.json")
GROUPS = ("facts", "json", "tools", "instructions_and_code")
MAX_TOKENS = 256
SPEED_TOKENS = 64
SPEED_ROUNDS = 3
STREAMS = 2
REQUEST_TIMEOUT_S = 300
FUNCTION_TIMEOUT_S = 10
FUNCTION_MEMORY_BYTES = 1 << 30
CODE_BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="[NAME=]MODEL", help="a name or file, as emberline serve takes it")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS, help="questions to ask (default: all)")
    reports.add_report_arguments(parser)
    args = parser.parse_args()
    questions = json.loads(QUESTIONS_FILE.read_text("utf-8"))
    report = reports.BenchReport("model-quality")
    report.config = {"temperature": 0, "max_tokens": MAX_TOKENS, "load_at_start": os.getloadavg()[0], "answers": {}}
    for given in args.models:
        name, _, model = given.rpartition("=")
        name = name or (Path(model).stem if model.endswith(".gguf") else model)
        measure_model(report, name, model, {g: questions[g] for g in (*args.groups, "tool_list")})
    report.config["load_at_end"] = os.getloadavg()[0]
    report.print_and_save(args.json, args.commit)
    return 0


def measure_model(report: reports.BenchReport, name: str, model: str, questions: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = [model, "--served-name", "m", "--embedder", "none"]
        with EmberlineServer(arguments, Path(folder) / "server.log") as server:
            report.add(f"{name} ready", server.ready_seconds, "s")
            answers: dict[str, Any] = {}
            for group in (group for group in GROUPS if group in questions):
                with ThreadPoolExecutor(STREAMS) as pool:
                    replies = list(pool.map(lambda q: ask(server.url, make_request(q, questions)), questions[group]))
                marks = [judge(q, reply) for q, reply in zip(questions[group], replies, strict=True)]
                report.add(f"{name} {group}", sum(marks), f"of {len(marks)}")
                answers[group] = [
                    {"right": mark, "answer": reply.get("tool_calls") or reply.get("content")}
                    for mark, reply in zip(marks, replies, strict=True)
                ]
            report.config["answers"][name] = answers
            report.add(f"{name} speed", [measure_speed(server.url) for _ in range(SPEED_ROUNDS)], "tok/s")
            processes = find_process_tree(server._process.pid).values()
            memory = sum(usage.rss for pid in processes if (usage := read_usage(pid)) is not None)
            report.add(f"{name} memory", memory / 1e9, "GB")


def make_request(question: dict[str, Any], questions: dict[str, Any]) -> dict[str, Any]:
    request: dict[str, Any] = {"messages": [{"role": "user", "content": question["question"]}]}
    if "schema" in question:
        schema = {"name": "answer", "strict": True, "schema": question["schema"]}
        request["response_format"] = {"type": "json_schema", "json_schema": schema}
    if "arguments" in question:
        request["tools"] = questions["tool_list"]
    return request


def ask(url: str, request: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps({"model": "m", "temperature": 0, "max_tokens": MAX_TOKENS, **request}).encode()
    post = urllib.request.Request(f"{url}/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(post, timeout=REQUEST_TIMEOUT_S) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
    return message


def measure_speed(url: str) -> float:
    """Return the tokens per second of one stream, including the time of its short prompt."""
    prompt = [{"role": "user", "content": "Tell a story."}]
    began = time.perf_counter()
    ask(url, {"messages": prompt, "max_tokens": SPEED_TOKENS, "min_tokens": SPEED_TOKENS, "ignore_eos": True})
    return SPEED_TOKENS / (time.perf_counter() - began)


def judge(question: dict[str, Any], reply: dict[str, Any]) -> bool:
    text = (reply.get("content") or "").strip()
    if "any_of" in question:
        return any(re.search(rf"\b{re.escape(word)}\b", text.lower()) for word in question["any_of"])
    if "expected" in question:
        return fold(parse_json(text)) == fold(question["expected"])
    if "arguments" in question:
        calls = [call["function"] for call in reply.get("tool_calls") or []]
        wanted = (question["name"], fold(question["arguments"]))
        return [(call["name"], fold(parse_json(call["arguments"]))) for call in calls] == [wanted]
    if "text" in question:
        return re.fullmatch(question["text"], text) is not None
    return passes_tests(text, question["tests"])


def parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def fold(value: Any) -> Any:
    """Return the value with texts in lower case and without the full stop at their ends."""
    if isinstance(value, dict):
        return {key: fold(item) for key, item in value.items()}
    if isinstance(value, list):
        return [fold(item) for item in value]
    return value.lower().strip(" .!") if isinstance(value, str) else value


def passes_tests(answer: str, tests: list[str]) -> bool:
    block = CODE_BLOCK.search(answer)
    code = block[1] if block else answer
    program = "\n".join([code, *(f"assert {test}" for test in tests)])
    try:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program],
                cwd=folder,
                env={},
                capture_output=True,
                timeout=FUNCTION_TIMEOUT_S,
                preexec_fn=limit_resources,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (FUNCTION_TIMEOUT_S, FUNCTION_TIMEOUT_S))
    resource.setrlimit(resource.RLIMIT_AS, (FUNCTION_MEMORY_BYTES, FUNCTION_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
