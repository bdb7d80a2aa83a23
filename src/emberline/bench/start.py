"""`emberline bench start`: measures how long `emberline serve` takes to start, and to answer over HTTP after that.

The model must be in the local cache; the time does not include a download. A first start, which may compile Python
files and kernels, is not counted.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median

from emberline.bench.blocking_client import BlockingClient
from emberline.bench.report import BenchReport
from emberline.bench.server_launch import EmberlineServer

WARM_ANSWERS = 5
LONG_ANSWER_TOKENS = 129


def bench(model: str, rounds: int, log_root: Path) -> BenchReport:
    report = BenchReport("start", {"model": model, "rounds": rounds, "target_seconds": 3})
    seconds, answers = [], []
    for _ in range(rounds + 1):
        with EmberlineServer([model], log_root / "logs" / "start.log") as server:
            seconds.append(server.ready_seconds)
            answers.append(measure_answers(server.url.removesuffix("/v1"), model))
    report.add("ready", seconds[1:], "s")
    first, warm, rate = (list(values) for values in zip(*answers[1:], strict=True))
    report.add("first_answer", first, "ms")
    report.add("warm_answer", warm, "ms")
    report.add("http_decode", rate, "tok/s")
    return report


def measure_answers(url: str, model: str) -> tuple[float, float, float]:
    """Return the milliseconds of the first answer and of later answers of one token, and a long answer's tokens/s."""
    client = BlockingClient(url)
    try:
        first, *later = (_answer_seconds(client, model, number, 1) for number in range(1 + WARM_ANSWERS))
        warm = median(later)
        long = _answer_seconds(client, model, 1 + WARM_ANSWERS, LONG_ANSWER_TOKENS)
    finally:
        client.close()
    return first * 1e3, warm * 1e3, (LONG_ANSWER_TOKENS - 1) / (long - warm)


def _answer_seconds(client: BlockingClient, model: str, number: int, tokens: int) -> float:
    """Return the seconds of one request. Each `number` gives a different prompt, so that no KV blocks are cached."""
    text = f"{number} times the following question: what are the largest rivers of Europe, and where do they end?"
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    client.post("/v1/chat/completions", json.dumps(body).encode())
    return time.perf_counter() - began
