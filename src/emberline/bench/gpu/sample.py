"""Measures sampling over the vocabulary of Llama 3.1, compared with torch.

The logits are read from GPU memory, as in a step whose logits do not fit into the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from emberline.bench.gpu.timing import bind_arguments, count_input_sets, time_graph_replay
from emberline.bench.report import BenchReport
from emberline.kernels.cuda.sample import apply_penalties, count_tokens, log_probs, sample

BYTES_PER_US = 4.39e6  # read bandwidth of an H200, measured by a plain reduction
VOCAB = 128256
ROWS = (1, 64, 256)
MAX_COPIES = 128  # even of one row, more than any cache holds
TOP_K, TOP_P = 50, 0.9
LIKELY_TOKENS, LIKELY_LOGIT_RANGE = (
    400,
    12.0,
)  # 400 tokens get up to 12.0 added to their logit, similar to a model's output

Calls = Sequence[Callable[[], object]]


def measure(report: BenchReport) -> None:
    for rows in ROWS:
        copies = min(MAX_COPIES, count_input_sets(4 * rows * VOCAB))
        inputs = [_random_logits(rows) for _ in range(copies)]
        limit = 4 * rows * VOCAB / BYTES_PER_US
        greedy = _make_sample_calls(inputs, 0.0), [bind_arguments(torch.argmax, x, -1) for x in inputs]
        top = _make_sample_calls(inputs, 1.0, TOP_K, TOP_P), [bind_arguments(_sample_by_sorting, x) for x in inputs]
        _add_comparison(report, f"sample_greedy_{rows}", *greedy, limit)
        _add_comparison(report, f"sample_top_{rows}", *top, limit)
        for name, settings in {"top_p": (1.0, 0, TOP_P), "plain": (1.0, 0, 1.0), "hot": (20.0, 0, 1.0)}.items():
            report.add(
                f"sample_{name}_{rows}", time_graph_replay(_make_sample_calls(inputs, *settings)), "us", limit=limit
            )
        report.add(f"penalties_{rows}", time_graph_replay(_make_penalty_calls(inputs)), "us")
        report.add(f"log_probs_{rows}", time_graph_replay(_make_log_prob_calls(inputs)), "us", limit=limit)
        print(f"sample {rows}: done", flush=True)
        del inputs, greedy, top
        torch.cuda.empty_cache()


def _add_comparison(report: BenchReport, name: str, our_calls: Calls, torch_calls: Calls, limit: float) -> None:
    report.add(name, time_graph_replay(our_calls), "us", peer=time_graph_replay(torch_calls, replays=5), limit=limit)


def _make_sample_calls(inputs: list[Tensor], temperature: float, top_k: int = 0, top_p: float = 1.0) -> Calls:
    rows = len(inputs[0])

    def filled_tensor(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    seed, position = torch.arange(rows, device="cuda"), filled_tensor(7, torch.int32)
    settings = (
        filled_tensor(temperature),
        filled_tensor(top_k, torch.int32),
        filled_tensor(top_p),
        filled_tensor(0.0),
        seed,
        position,
    )
    out = filled_tensor(0, torch.int64)
    return [bind_arguments(sample, logits, *settings, out) for logits in inputs]


def _make_log_prob_calls(inputs: list[Tensor]) -> Calls:
    ids = torch.arange(len(inputs[0]), device="cuda")
    out = log_probs(inputs[0], ids, 5)
    return [lambda x=x: log_probs(x, ids, 5, out=out) for x in inputs]  # type: ignore[misc]


def _make_penalty_calls(inputs: list[Tensor]) -> Calls:
    """Return functions that apply penalties for a prompt of 4,096 tokens and count one sampled token."""
    rows = torch.arange(len(inputs[0]), device="cuda", dtype=torch.int32)
    counts = torch.zeros(len(rows), VOCAB, device="cuda", dtype=torch.int16)
    counts.scatter_(1, torch.randint(VOCAB, (len(rows), 4096), device="cuda"), 1)
    settings = torch.tensor([[1.1, 0.2, 0.5]], device="cuda").repeat(len(rows), 1)
    tokens = torch.arange(len(rows), device="cuda")

    def penalize_and_count(logits: Tensor) -> None:
        apply_penalties(logits, rows, rows, settings, counts)
        count_tokens(counts, rows, rows, tokens)

    return [bind_arguments(penalize_and_count, x) for x in inputs]


def _sample_by_sorting(logits: Tensor) -> Tensor:
    """Sample with torch by sorting the logits.

    The draw works as torch.multinomial does, without its check of the input.
    """
    ordered, ids = logits.sort(descending=True)
    ordered[:, TOP_K:] = -torch.inf
    p = ordered.softmax(-1)
    p = p.masked_fill(p.cumsum(-1) - p >= TOP_P, 0)
    drawn = p.div_(torch.empty_like(p).exponential_()).argmax(-1, keepdim=True)
    return ids.gather(1, drawn)


def _random_logits(rows: int) -> Tensor:
    logits = torch.randn(rows, VOCAB, device="cuda") * 2
    likely_ids = torch.randint(VOCAB, (rows, LIKELY_TOKENS), device="cuda")
    return logits.scatter_add_(1, likely_ids, torch.rand(rows, LIKELY_TOKENS, device="cuda") * LIKELY_LOGIT_RANGE)
