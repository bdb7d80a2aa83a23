"""`python -m emberline.bench.kv8`: how much quality `--kv-dtype float8` costs, on a real model and real text.

The text is cut into windows. Each window is computed on the CPU with a KV cache in float32, in bfloat16 and in float8.
Keys and values are rounded at the same point as on a GPU: after norm and rotation, and before any token attends to
them. Float8 is rounded to the nearest e4m3 number without a scale, and clamped to 448.

Everything else is computed in float32, so that only the cache causes the differences. A GPU rounds further values in
any case: activations, queries and attention weights. These roundings are not part of this measurement.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from emberline.bench import report as reports
from emberline.bench.report import BenchReport
from emberline.core.config import DEFAULT_MODEL
from emberline.core.cpus import core_count
from emberline.core.errors import InvalidRequest
from emberline.core.plan import WorkItem
from emberline.engine.batch import build_forward_batch
from emberline.engine.model_support import reject_states
from emberline.hub.source import resolve_model
from emberline.kernels import ops
from emberline.kv.cache import KVCache, KVShape
from emberline.models import attention
from emberline.models.decoder import DecoderModel
from emberline.models.loader import load_decoder
from emberline.tokens.tokenizer import Tokenizer

Rounding = Callable[[Tensor], Tensor]

TEXTS = ("README.md", "docs/architecture.md", "docs/glossary.md", "docs/log.md")
WINDOW = 2048  # tokens of a window, which starts at position 0
CHUNK = 256  # tokens of a step
SPANS = (0, 128, 512, 1024, 2048, 4096, 8192)  # positions between which figures are also reported
BLOCK = 16
FLOAT8_MAX = 448.0  # the largest e4m3 number


def round_to_float8(x: Tensor) -> Tensor:
    """Round to e4m3 as kernels/triton/rope.py does. Larger numbers are clamped to the largest e4m3 number."""
    return x.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).float()


def round_to_bfloat16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


ROUNDINGS: dict[str, Rounding] = {"float8": round_to_float8, "bfloat16": round_to_bfloat16}


class RoundingOps:
    """The module `kernels.ops` with one change: all values that are written to the KV cache are rounded."""

    def __init__(self, rounding: Rounding) -> None:
        self._rounding = rounding

    def __getattr__(self, name: str) -> Any:
        return getattr(ops, name)

    def rope_and_cache(
        self,
        qkv: Tensor,
        layer: ops.AttentionLayer,
        keys: Tensor,
        values: Tensor,
        metadata: ops.AttentionMetadata,
    ) -> None:
        ops.rope_and_cache(qkv, layer, keys, values, metadata)
        blocks = (metadata.slots // values.shape[2]).unique()  # whole blocks: rounding twice changes nothing
        for cache in (keys, values):
            cache[blocks] = self._rounding(cache[blocks])


@contextmanager
def round_cached_values(rounding: Rounding) -> Iterator[None]:
    """Round all values that attention writes to the KV cache, while the context is open."""
    names = vars(attention)
    names["ops"] = RoundingOps(rounding)
    try:
        yield
    finally:
        names["ops"] = ops


@dataclass(slots=True)
class RoundingErrors:
    """The errors that one number format of the KV cache causes, for each position of each window."""

    kl: list[Tensor] = field(default_factory=list)  # nats, KL divergence from the exact distribution
    same: list[Tensor] = field(default_factory=list)  # whether the most probable token is the same
    nll: list[Tensor] = field(default_factory=list)  # nats, of the next token
    mean: list[Tensor] = field(default_factory=list)  # mean error of the logits
    most: list[Tensor] = field(default_factory=list)

    def add_chunk(self, exact_logits: Tensor, rounded_logits: Tensor, next_tokens: Tensor) -> None:
        p, q = exact_logits.double().log_softmax(-1), rounded_logits.double().log_softmax(-1)
        error = (rounded_logits - exact_logits).abs()
        self.kl.append((p.exp() * (p - q)).sum(-1).clamp(min=0))
        self.same.append(exact_logits.argmax(-1) == rounded_logits.argmax(-1))
        self.nll.append(-q[: len(next_tokens)].gather(1, next_tokens[:, None])[:, 0])
        self.mean.append(error.mean(-1))
        self.most.append(error.amax(-1))


class RoundingRun:
    """Computes logits of consecutive windows with one model and one number format of the KV cache."""

    def __init__(self, model: DecoderModel, rounding: Rounding | None) -> None:
        c = model.config
        reject_states(c, "this benchmark", "choose a model without recurrent layers")
        self._model = model if rounding is None else replace(model, stack=None)  # not one native call for all layers
        self._rounding = rounding
        self.cache = KVCache(KVShape(c.layers, c.kv_heads, c.head_dim, BLOCK, torch.float32), -(-WINDOW // BLOCK))

    def compute_logits(self, tokens: list[int], first_position: int) -> Tensor:
        work = [WorkItem("", first_position, tokens, range(self.cache.num_blocks), samples=True, prompt_logprobs=True)]
        step = build_forward_batch(work, self.cache)
        if self._rounding is None:
            return self._model.forward(step)
        with round_cached_values(self._rounding):
            return self._model.forward(step)


class CacheDtypeComparison(NamedTuple):
    errors: dict[str, RoundingErrors]  # by number format
    positions: np.ndarray  # position of each error in its window
    largest: dict[str, float]  # largest absolute key and value


@torch.inference_mode()
def compare_cache_dtypes(model: DecoderModel, tokens: list[int]) -> CacheDtypeComparison:
    """Compute the text with each number format of the KV cache and return the errors against float32."""
    exact, runs = RoundingRun(model, None), {name: RoundingRun(model, rounding) for name, rounding in ROUNDINGS.items()}
    errors = {name: RoundingErrors() for name in ("float32", *runs)}
    positions, largest = [], {"key": 0.0, "value": 0.0}
    for at in range(0, len(tokens), CHUNK):
        start, chunk = at % WINDOW, tokens[at : at + CHUNK]
        last = start + len(chunk) == WINDOW  # the next token is computed without this context
        successors = torch.tensor(tokens[at + 1 : at + len(chunk) + (not last)], dtype=torch.int64)
        truth = exact.compute_logits(chunk, start)
        for name, one in errors.items():
            one.add_chunk(truth, truth if name == "float32" else runs[name].compute_logits(chunk, start), successors)
        positions.append(np.arange(start, start + len(chunk)))
        for name, cache in (("key", exact.cache.keys), ("value", exact.cache.values)):
            largest[name] = max(largest[name], cache.abs().max().item())
        print(f"{at + len(chunk)} of {len(tokens)} tokens", file=sys.stderr, flush=True)
    return CacheDtypeComparison(errors, np.concatenate(positions), largest)


def bench(model_name: str, text: str, config: dict[str, Any]) -> BenchReport:
    directory = resolve_model(model_name)
    backend = ops.start_backend()
    torch.set_num_threads(core_count() if backend.library is None else 1)
    model = load_decoder(directory, "auto", WINDOW)
    tokens = Tokenizer.load(directory).encode(text, add_special=False)
    if len(tokens) < 2:
        raise InvalidRequest(f"the text has {len(tokens)} tokens, but it must have at least 2", param="text")
    report = BenchReport("kv-float8", {"model": model_name, "weights": str(model.dtype), "window": WINDOW, **config})
    report.config |= {"tokens": len(tokens), "text_sha256": hashlib.sha256(text.encode()).hexdigest()[:16]}
    errors, positions, largest = compare_cache_dtypes(model, tokens)
    for kind in ROUNDINGS:
        add_error_results(report, errors[kind], positions, "" if kind == "float8" else f"/{kind}")
    for kind, one in errors.items():
        report.add(f"perplexity_{kind}", torch.cat(one.nll).mean().exp().item(), "")
    for what, size in largest.items():
        report.add(f"largest_{what}", size, "")
    return report


def add_error_results(report: BenchReport, errors: RoundingErrors, positions: np.ndarray, name_suffix: str) -> None:
    kl, same = torch.cat(errors.kl).numpy(), torch.cat(errors.same).numpy()
    mean, most = torch.cat(errors.mean).numpy(), torch.cat(errors.most).numpy()
    spans = [(low, high, (positions >= low) & (positions < high)) for low, high in pairwise(SPANS)]
    everywhere = ("", np.ones(len(kl), bool))
    for where, here in (everywhere, *((f"_{low}_{high - 1}", here) for low, high, here in spans)):
        if here.any():
            report.add(f"kl_mean{where}{name_suffix}", kl[here].mean(), "nats")
            report.add(f"kl_p99{where}{name_suffix}", float(np.quantile(kl[here], 0.99)), "nats")
            report.add(f"top1_agreement{where}{name_suffix}", same[here].mean() * 100, "%")
            report.add(f"logit_error_mean{where}{name_suffix}", mean[here].mean(), "")
            report.add(f"logit_error_max{where}{name_suffix}", most[here].max(), "")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m emberline.bench.kv8", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--text", type=Path, nargs="+", default=[Path(name) for name in TEXTS], metavar="FILE")
    reports.add_report_arguments(parser)
    args = parser.parse_args()
    text = "\n\n".join(path.read_text("utf-8") for path in args.text)
    bench(args.model, text, {"text": [str(path) for path in args.text]}).print_and_save(args.json, args.commit)


if __name__ == "__main__":
    main()
