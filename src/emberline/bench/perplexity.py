"""`python -m emberline.bench.perplexity`: how much quality each format of quantised weights costs, on a real model.

The matrices of all layers are quantised and dequantised again, as `--weights` and a checkpoint's publisher do; the
embedding, the output head and norms stay as they are. Everything is computed on the CPU in float32, so that only the
weights cause the differences. Kernels that also quantise activations to float8 add their own rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.source import resolve_model
from emberline.kernels import ops
from emberline.kernels.quantise import quantise
from emberline.kernels.quantised_matrix import dequantise
from emberline.kv.cache import KVCache, KVShape
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.tensor_names import ignorable_tensors, load_model
from emberline.models.weight_formats import choose_online_format
from emberline.models.weights import Weights
from emberline.tokens.tokenizer import Tokenizer

TEXT = Path("benchmarks/text/prose.txt")
WINDOW = 1024  # tokens of a window, which starts at position 0
BLOCK = 16
FP8_BLOCK = 128  # rows and columns
INT4_SMALL_GROUP = 32
QUANTISED_TENSORS = re.compile(r"model\.layers\.\d+\..*_proj\.weight")
Rounding = Callable[[Tensor], Tensor]


def round_to_int4(values: Tensor) -> Tensor:
    """Round a matrix to int4 with a scale for each group of columns, of the size that `--weights int4` chooses."""
    found = choose_online_format("int4", values.shape[-1])
    return values if found is None else dequantise(quantise(values, "int4", 1, found.group_columns, search=True))


ROUNDINGS: Mapping[str, Rounding] = {
    "bf16": lambda values: values.to(torch.bfloat16).float(),
    "fp8_rows": lambda values: dequantise(quantise(values, "fp8")),
    "fp8_blocks": lambda values: dequantise(quantise(values, "fp8", FP8_BLOCK, FP8_BLOCK)),
    "int4_g128": round_to_int4,
    "int4_g32": lambda values: dequantise(quantise(values, "int4", 1, INT4_SMALL_GROUP, search=True)),
    "mxfp4": lambda values: dequantise(quantise(values, "mxfp4")),
    "nvfp4": lambda values: dequantise(quantise(values, "nvfp4")),
}


class RoundedWeights(Weights):
    """Weights in float32. The matrices of layers are rounded to a quantised format."""

    def __init__(self, checkpoint: Checkpoint, rounding: Rounding) -> None:
        super().__init__(checkpoint, torch.float32)
        self._rounding = rounding

    def _view_tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        values = super()._view_tensor(name, shape)
        return self._rounding(values.float()) if QUANTISED_TENSORS.fullmatch(name) else values


def load_rounded(checkpoint: Checkpoint, rounding: Rounding) -> DecoderModel:
    config = ModelConfig.from_checkpoint(checkpoint)
    reject_states(config, "this benchmark", "choose a model without recurrent layers")
    weights = RoundedWeights(checkpoint, rounding)
    model = load_model(config, weights, WINDOW)
    weights.finish(ignorable_tensors(config))
    return model


@torch.inference_mode()
def compute_losses(model: DecoderModel, tokens: list[int]) -> Tensor:
    """Return the loss in nats of each token, except the first of each window, which has no context."""
    c = model.config
    cache = KVCache(KVShape(c.layers, c.kv_heads, c.head_dim, BLOCK, torch.float32), -(-WINDOW // BLOCK))
    losses = []
    for at in range(0, len(tokens), WINDOW):
        window = tokens[at : at + WINDOW]
        if len(window) < 2:
            break
        work = [WorkItem("", 0, window, range(cache.num_blocks), samples=True, prompt_logprobs=True)]
        logits = model.forward(build_forward_batch(work, cache))[: len(window) - 1].double()
        losses.append(-logits.log_softmax(-1).gather(1, torch.tensor(window[1:])[:, None])[:, 0])
    return torch.cat(losses)


def bench(model_name: str, text: str, config: dict[str, Any]) -> BenchReport:
    directory = resolve_model(model_name, as_safetensors=True)
    backend = ops.start_backend()
    torch.set_num_threads(core_count() if backend.library is None else 1)
    tokens = Tokenizer.load(directory).encode(text, add_special=False)
    if len(tokens) < 2:
        raise InvalidRequest(f"the text has {len(tokens)} tokens, but it must have at least 2", param="text")
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    sizes = {"model": model_name, "window": WINDOW, "tokens": len(tokens), "text_sha256": digest}
    report = BenchReport("perplexity", {**sizes, **config})
    checkpoint = Checkpoint.open(directory)
    for name, rounding in ROUNDINGS.items():
        losses = compute_losses(load_rounded(checkpoint, rounding), tokens)
        report.add(f"perplexity_{name}", losses.mean().exp().item(), "")
        print(f"{name}: {losses.mean().exp().item():.4f}", file=sys.stderr, flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m emberline.bench.perplexity", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--text", type=Path, default=TEXT, metavar="FILE")
    reports.add_report_arguments(parser)
    args = parser.parse_args()
    text = args.text.read_text("utf-8")
    bench(args.model, text, {"text": str(args.text)}).print_and_save(args.json, args.commit)


if __name__ == "__main__":
    main()
