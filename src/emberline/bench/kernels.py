"""`python -m emberline.bench.kernels`: the CPU kernels alone and a whole forward pass, with random weights.

Linear layers are compared with torch. On CPUs with AMX, AVX512-BF16 or bfmmla, our kernels and torch use bf16 inputs,
and torch is measured with plain weights and with weights in oneDNN's layout. On other CPUs both use float32. With up to
FEW_ROWS rows, a layer is run with many copies of its weight, so that no copy is in the CPU cache, as between two
steps of a model. With more rows the arithmetic is the limit. Weights in GGUF blocks are measured as all products of
a step of SmolLM2 together, and each type with one matrix of an 8B model. The benchmark needs torch, numpy and a
compiler, but no model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from emberline.bench import machine_limits
from emberline.bench import report as reports
from emberline.bench.gpu.model import RandomWeights
from emberline.bench.machine import last_level_cache_bytes
from emberline.bench.machine_limits import MachineLimits, TokenCost
from emberline.bench.report import BenchReport
from emberline.core.cpus import core_count
from emberline.kernels import ops
from emberline.kernels.gguf_blocks import BLOCK_FORMATS
from emberline.kernels.packed_weight import WeightLayout
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.forward import ForwardBatch

Work = Callable[[], object]

SECONDS, LEAST, MOST = 0.1, 3, 100  # seconds, and minimum and maximum rounds, of one figure
FEW_ROWS = 16
MIN_COPIED_BYTES = 1 << 28  # size of all copies of a weight, if 1.5 times the CPU's last cache is less
ROWS = (1, 8, 16, 64, 512, 2048)
LINEARS = {  # rows and columns of the weights: SmolLM2-135M, then one of an 8B Llama
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
    "8b_o": (4096, 4096),
}
LAYER_LINEARS = ("qkv", "o", "gate_up", "down")
SMALL_BLOCK_TYPES = ("Q4_0", "Q4_1", "Q8_0")  # whose blocks divide SmolLM2's rows
BLOCK_ROWS = (1, 8, 16, 512)
MAX_FLOP = 30e9  # larger products give no new information
STEPS = {  # sequences, new tokens of each, and tokens before them
    "decode_1": (1, 1, 128),
    "decode_8": (8, 1, 128),
    "decode_16": (16, 1, 128),
    "prefill_512": (1, 512, 0),
    "prefill_2048": (1, 2048, 0),
}
BLOCK = 16
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def bench(threads: int) -> BenchReport:
    backend = ops.start_backend(threads=threads)
    top = machine_limits.measure_limits(threads)  # also sets torch's number of threads
    report = BenchReport(
        "kernels", {"threads": threads, "backend": str(backend), "ceiling": top.how, "on_more_cores": {}}
    )
    report.add("read_bandwidth", top.bandwidth / 1e9, "GB/s")
    report.add("matmul", top.flops / 1e9, "GFLOP/s")
    _measure_forward_passes(report, top)
    for name, (n, k) in LINEARS.items():
        _measure_linear(report, name, n, k, top)
        print(f"{name}: done", file=sys.stderr, flush=True)
    for kind in SMALL_BLOCK_TYPES:
        _measure_smollm2_blocks(report, kind, top)
    for kind in BLOCK_FORMATS:
        _measure_block_matrix(report, kind, *LINEARS["8b_o"], top)
    return report


def _pack_random_blocks(kind: str, n: int, k: int, *, gated: bool = False) -> ops.PackedWeight:
    found = BLOCK_FORMATS[kind]
    # Some bytes of a block are float16 scales. With bytes below 64, these are finite.
    blocks = torch.randint(64, (n, k // found.elements * found.file_bytes), dtype=torch.uint8)
    return ops.pack_gguf(blocks, kind, k, gated=gated)


def _time_products(weights: list[ops.PackedWeight], m: int) -> list[float]:
    """Return the seconds, in each round, of multiplying m rows with all weights, which have the same shape."""
    first, norm = weights[0], torch.ones(weights[0].k)
    x, y = torch.randn(m, first.k), torch.empty(m, first.n // 2 if first.gated else first.n)
    product = ops.gate_up_silu if first.gated else ops.linear
    layers = [ops.LinearLayer(w, norm=norm if w.gated else None, eps=1e-5) for w in weights]
    return _time_rounds(lambda: [product(x, layer, out=y) for layer in layers])


def _measure_smollm2_blocks(report: BenchReport, kind: str, limits: MachineLimits) -> None:
    """Measure all matrix products of a step of SmolLM2, with weights in GGUF blocks of this kind."""
    layers, steps = SMOLLM2["num_hidden_layers"], {}
    for name in (*LAYER_LINEARS, "head"):
        packed, copies = _pack_random_blocks(kind, *LINEARS[name], gated=name == "gate_up"), 1
        if name != "head":
            assert isinstance(layers, int)
            copies = layers
        steps[name] = [packed] + [replace(packed, data=d, ptr=d.data_ptr()) for d in _clone_tensor(packed.data, copies)]
    size = sum(weight.data.nbytes for weights in steps.values() for weight in weights)
    for m in BLOCK_ROWS:
        rows = {name: 1 if name == "head" and m > FEW_ROWS else m for name in steps}  # a prompt needs one row of logits
        seconds = sum(min(_time_products(weights, rows[name])) for name, weights in steps.items())
        limit = m * limits.bandwidth / size if m <= FEW_ROWS else None
        report.add(f"{kind}_{m}", m / seconds, "tok/s", limit=limit)
        report.add(f"{kind}_{m}_read", size / seconds / 1e9, "GB/s")
    print(f"{kind}: done", file=sys.stderr, flush=True)


def _measure_block_matrix(report: BenchReport, kind: str, n: int, k: int, limits: MachineLimits) -> None:
    packed = _pack_random_blocks(kind, n, k)
    size = packed.data.nbytes
    copies = -(-max(MIN_COPIED_BYTES, last_level_cache_bytes() * 3 // 2) // size)
    weights = [packed] + [replace(packed, data=d, ptr=d.data_ptr()) for d in _clone_tensor(packed.data, copies)]
    for m in BLOCK_ROWS:
        used = weights if m <= FEW_ROWS else weights[:1]
        seconds = [s / len(used) for s in _time_products(used, m)]
        limit = size / limits.bandwidth * 1e6 if m <= FEW_ROWS else None
        report.add(f"8b_o_{kind}_{m}", [s * 1e6 for s in seconds], "us", limit=limit)


def _measure_linear(report: BenchReport, name: str, n: int, k: int, limits: MachineLimits) -> None:
    weight = torch.randn(n, k).to(torch.bfloat16)
    packed = ops.pack_linear(weight, gated=name == "gate_up")
    copies = -(-max(MIN_COPIED_BYTES, last_level_cache_bytes() * 3 // 2) // weight.nbytes)
    ours = [packed] + [replace(packed, data=data, ptr=data.data_ptr()) for data in _clone_tensor(packed.data, copies)]
    for m in ROWS:
        flop, some = 2.0 * m * n * k, copies if m <= FEW_ROWS else 1
        if flop > MAX_FLOP:
            continue
        x, norm = torch.randn(m, k), torch.ones(k)
        y = torch.empty(m, n // 2 if packed.gated else n)

        layers = [ops.LinearLayer(w, norm=norm if w.gated else None, eps=1e-5) for w in ours]
        product = ops.gate_up_silu if packed.gated else ops.linear

        def multiply_all(product=product, layers=layers[:some], x=x, y=y) -> object:  # type: ignore[no-untyped-def]
            return [product(x, layer, out=y) for layer in layers]

        seconds = _time_rounds(multiply_all)
        limit = max(flop / limits.flops, weight.nbytes / limits.bandwidth if m <= FEW_ROWS else 0.0)
        label = f"{name}_{m}"
        theirs = _measure_peers(report, label, _torch_implementations(x, weight, some, packed.layout), some)
        best = min(theirs.values(), default=None)
        report.add(label, [s / some * 1e6 for s in seconds], "us", peer=best, limit=limit * 1e6)
        for peer, value in theirs.items():
            report.add(f"{label}/{peer}", value, "us")


def _measure_peers(
    report: BenchReport, label: str, implementations: Iterator[tuple[str, Work]], products_per_call: int
) -> dict[str, float]:
    """Return the microseconds of one matrix product with each of torch's implementations, by name.

    An implementation that used more cores than configured is left out, because it is not comparable, and is named in
    the report's configuration.
    """
    best = {}
    for peer, work in implementations:
        wall, busy = time.perf_counter(), time.process_time()
        times = _time_rounds(work)
        cores = (time.process_time() - busy) / (time.perf_counter() - wall)
        if cores > report.config["threads"] * 1.15:
            report.config["on_more_cores"][f"{label}/{peer}"] = round(cores, 2)
        else:
            best[peer] = min(times) / products_per_call * 1e6
    return best


def _torch_implementations(x: Tensor, weight: Tensor, copies: int, layout: WeightLayout) -> Iterator[tuple[str, Work]]:
    """Yield the name and a function for each way in which torch can compute the product.

    The weights of only one implementation are in memory at a time.
    """
    if layout is not WeightLayout.BF16_TILES:
        wide = [weight.float() for _ in range(max(1, copies // 2))] * (2 if copies > 1 else 1)
        yield "torch_fp32", lambda: [linear(x, w) for w in wide[:copies]]
        return
    inputs = x.to(torch.bfloat16)
    plain = [weight, *_clone_tensor(weight, copies)]
    yield "torch_bf16", lambda: [linear(inputs, w) for w in plain]
    mkldnn = torch.ops.mkldnn
    try:
        ready = [mkldnn._reorder_linear_weight(weight.to_mkldnn(), len(x)) for _ in range(copies)]
        mkldnn._linear_pointwise(inputs, ready[0], None, "none", [], "")
    except (AttributeError, RuntimeError):
        return  # a torch without oneDNN
    yield "onednn", lambda: [mkldnn._linear_pointwise(inputs, w, None, "none", [], "") for w in ready]


def _measure_forward_passes(report: BenchReport, limits: MachineLimits) -> None:
    config = ModelConfig.from_hf(SMOLLM2)
    model = DecoderModel.load(config, RandomWeights("cpu", torch.bfloat16), 4096, "random")
    blocks = max(1 + batch * -(-(new + before) // BLOCK) for batch, new, before in STEPS.values())
    keys = torch.zeros(config.layers, blocks, config.kv_heads, BLOCK, config.head_dim, dtype=torch.bfloat16)
    values, cost = keys.clone(), TokenCost.from_config(config)
    for name, (batch, new, before) in STEPS.items():
        step = _make_forward_batch(batch, new, before, config.vocab, keys, values)
        rates = [batch * new / seconds for seconds in _time_rounds(lambda step=step: model.forward(step))]  # type: ignore[misc]
        limit = cost.max_prefill_rate(limits, new) if new > 1 else cost.max_decode_rate(limits, batch, before)
        report.add(name, rates, "tok/s", limit=limit)
        report.add(f"{name}_attention", _time_attention_ms(step, config), "ms")


def _time_attention_ms(step: ForwardBatch, config: ModelConfig) -> list[float]:
    """Return the milliseconds of attention in all layers of a step, one value per round.

    Only the first layer is measured; its time is multiplied by the number of layers.
    """
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
    qkv = torch.randn(len(step.tokens), (heads + 2 * kv_heads) * head_dim)
    layer = ops.AttentionLayer(heads, kv_heads, head_dim, scale=head_dim**-0.5, cos_sin=torch.empty(0))
    seconds = _time_rounds(lambda: ops.paged_attention(qkv, layer, step.keys[0], step.values[0], step.attention))
    return [config.layers * s * 1e3 for s in seconds]


def _make_forward_batch(
    batch: int, new_tokens: int, cached_tokens: int, vocab_size: int, keys: Tensor, values: Tensor
) -> ForwardBatch:
    per = -(-(new_tokens + cached_tokens) // BLOCK)
    tables = torch.arange(1, 1 + batch * per, dtype=torch.int32).view(batch, per)
    at = torch.arange(cached_tokens, cached_tokens + new_tokens).repeat(batch, 1)
    return ForwardBatch(
        tokens=torch.randint(vocab_size, (batch * new_tokens,)),
        attention=ops.AttentionMetadata(
            positions=at.flatten().int(),
            slots=(tables.gather(1, at // BLOCK).long() * BLOCK + at % BLOCK).flatten(),
            query_start=torch.arange(0, batch * new_tokens + 1, new_tokens).int(),
            context=torch.full((batch,), cached_tokens).int(),
            block_tables=tables,
        ),
        logit_rows=torch.arange(new_tokens - 1, batch * new_tokens, new_tokens),
        keys=keys,
        values=values,
    )


def _clone_tensor(tensor: Tensor, total_count: int) -> list[Tensor]:
    return [tensor.clone() for _ in range(total_count - 1)]


def _time_rounds(work: Work) -> list[float]:
    work()
    times: list[float] = []
    while len(times) < LEAST or (sum(times) < SECONDS and len(times) < MOST):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m emberline.bench.kernels", description=__doc__)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    reports.add_report_arguments(parser)
    args = parser.parse_args()
    bench(args.threads or core_count()).print_and_save(args.json, args.commit)


if __name__ == "__main__":
    main()
