"""Sampling over the vocabulary of Llama 3.1, beside the same in torch. The logits come from memory, as after a step
whose logits do not stay in the cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from emberline.bench.gpu.timing import copies_for, replay
from emberline.bench.report import Report
from emberline.kernels.cuda.sample import count_tokens, log_probs, penalise, sample

BYTES_PER_US = 4.39e6  # what a plain read reaches on an H200
VOCAB = 128256
ROWS = (1, 64, 256)
MOST_COPIES = 128  # of one row: still more than any cache
TOP_K, TOP_P = 50, 0.9
HEADED, HEAD = 400, 12.0  # so many tokens stand out by up to so much, as a model's do

Calls = list[Callable[[], object]]


def measure(report: Report) -> None:
    for rows in ROWS:
        copies = min(MOST_COPIES, copies_for(4 * rows * VOCAB))
        inputs = [_logits(rows) for _ in range(copies)]
        limit = 4 * rows * VOCAB / BYTES_PER_US
        greedy = _ours(inputs, 0.0), [_bound(torch.argmax, x, -1) for x in inputs]
        top = _ours(inputs, 1.0, TOP_K, TOP_P), [_bound(_by_sorting, x) for x in inputs]
        _compare(report, f"sample_greedy_{rows}", *greedy, limit)
        _compare(report, f"sample_top_{rows}", *top, limit)
        for name, settings in {"top_p": (1.0, 0, TOP_P), "plain": (1.0, 0, 1.0), "hot": (20.0, 0, 1.0)}.items():
            report.add(f"sample_{name}_{rows}", replay(_ours(inputs, *settings)), "us", limit=limit)
        report.add(f"penalties_{rows}", replay(_penalised(inputs)), "us")
        report.add(f"log_probs_{rows}", replay(_scored(inputs)), "us", limit=limit)
        print(f"sample {rows}: done", flush=True)
        del inputs, greedy, top
        torch.cuda.empty_cache()


def _compare(report: Report, name: str, ours: Calls, torchs: Calls, limit: float) -> None:
    report.add(name, replay(ours), "us", peer=replay(torchs, replays=5), limit=limit)


def _ours(inputs: list[Tensor], temperature: float, top_k: int = 0, top_p: float = 1.0) -> Calls:
    rows = len(inputs[0])

    def every(value: float, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=kind, device="cuda")

    seed, position = torch.arange(rows, device="cuda"), every(7, torch.int32)
    settings = every(temperature), every(top_k, torch.int32), every(top_p), every(0.0), seed, position
    out = every(0, torch.int64)
    return [_bound(sample, logits, *settings, out) for logits in inputs]


def _scored(inputs: list[Tensor]) -> Calls:
    ids = torch.arange(len(inputs[0]), device="cuda")
    out = log_probs(inputs[0], ids, 5)
    return [lambda x=x: log_probs(x, ids, 5, out=out) for x in inputs]  # type: ignore[misc]


def _penalised(inputs: list[Tensor]) -> Calls:
    """Of a prompt of 4,096 tokens, and the count of one that is sampled."""
    rows = torch.arange(len(inputs[0]), device="cuda", dtype=torch.int32)
    counts = torch.zeros(len(rows), VOCAB, device="cuda", dtype=torch.int16)
    counts.scatter_(1, torch.randint(VOCAB, (len(rows), 4096), device="cuda"), 1)
    settings = torch.tensor([[1.1, 0.2, 0.5]], device="cuda").repeat(len(rows), 1)
    tokens = torch.arange(len(rows), device="cuda")

    def call(logits: Tensor) -> None:
        penalise(logits, rows, rows, settings, counts)
        count_tokens(counts, rows, rows, tokens)

    return [_bound(call, x) for x in inputs]


def _by_sorting(logits: Tensor) -> Tensor:
    """The draw is what multinomial does, without its check of the input."""
    ordered, ids = logits.sort(descending=True)
    ordered[:, TOP_K:] = -torch.inf
    p = ordered.softmax(-1)
    p = p.masked_fill(p.cumsum(-1) - p >= TOP_P, 0)
    drawn = p.div_(torch.empty_like(p).exponential_()).argmax(-1, keepdim=True)
    return ids.gather(1, drawn)


def _bound(function: Callable[..., object], *arguments: object) -> Callable[[], object]:
    return lambda: function(*arguments)


def _logits(rows: int) -> Tensor:
    logits = torch.randn(rows, VOCAB, device="cuda") * 2
    places = torch.randint(VOCAB, (rows, HEADED), device="cuda")
    return logits.scatter_add_(1, places, torch.rand(rows, HEADED, device="cuda") * HEAD)
