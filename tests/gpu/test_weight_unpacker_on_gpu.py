"""Weights unpacked in advance on a GPU give the same bits as plain ones, captured or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from gpu_settings import gpu_config
from linear_cases import heavy, random
from torch import Tensor

from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.gpu.device import CudaDevice
from emberline.engine.scheduler import MAX_SCORED_TOKENS
from emberline.kernels import ops
from emberline.kernels.packed_weight import PackedWeight
from emberline.kernels.weight_unpacker import WeightUnpacker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HIDDEN, FFN, LAYERS = 1024, 2816, 4
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}

Layer = tuple[PackedWeight, ...]  # a square matrix; gate and up; down


def make_weight(rows: Tensor, *, gated: bool = False) -> PackedWeight:
    n, k = rows.shape
    weight = ops.empty_weight(n, k, rows.dtype, rows.device, gated=gated)
    assert ops.fill_weight(weight, rows) < rows.nbytes
    return weight


def compute_products(x: Tensor, layers: list[Layer], head: PackedWeight, ahead: WeightUnpacker | None) -> Tensor:
    """Compute the products of a model without attention."""
    x = x.clone()
    norm = torch.ones(HIDDEN, device="cuda")
    for square, gate_up, down in layers:
        mixed = ops.linear(x, ops.LinearLayer(square, norm=norm, eps=1e-5), unpacker=ahead)
        inner = ops.gate_up_silu(mixed, ops.LinearLayer(gate_up, norm=norm, eps=1e-5), unpacker=ahead)
        ops.linear(inner, ops.LinearLayer(down), add_to=x, unpacker=ahead)
    return ops.linear(x, ops.LinearLayer(head), float32_output=True)


def capture_step(work: Callable[[], Tensor], device: CudaDevice) -> tuple[Tensor, Callable[[], None]]:
    """Return the result tensor of a captured step, and a function that replays it."""
    made: list[Tensor] = []
    replay = device.step_stream.capture(lambda: made.append(work()))
    return made[0], replay


@pytest.mark.parametrize("m", [385, 400, 1100])  # with fewer rows cuBLAS is not used
def test_products_equal_those_of_plain_weights(m: int) -> None:
    torch.manual_seed(0)
    shapes = ((HIDDEN, HIDDEN, False), (2 * FFN, HIDDEN, True), (HIDDEN, FFN, False))
    rows = [[heavy(n, k) for n, k, _ in shapes] for _ in range(LAYERS)]
    last, x = heavy(4096, HIDDEN), random(m, HIDDEN)
    both = []
    for make in (ops.pack_linear, make_weight):
        layers = [tuple(make(w, gated=s[2]) for w, s in zip(layer, shapes, strict=True)) for layer in rows]
        both.append((layers, make(last)))
    device = CudaDevice()
    torch.cuda.synchronize()
    with torch.inference_mode(), device.step_stream.activate():
        expected = compute_products(x, *both[0], None)
        order = [weight for layer in both[1][0] for weight in layer]
        ahead = WeightUnpacker(order, len(order), device.step_stream, device.new_stream())
        for _ in range(3):
            assert torch.equal(compute_products(x, *both[1], ahead.begin_step()), expected)
        places = [place.memory for place in ahead._buffers]
        assert len(places) == 2
        result, replay = capture_step(lambda: compute_products(x, *both[1], ahead.begin_step()), device)
        for _ in range(20):
            for memory in (result, *places):
                memory.fill_(torch.nan)
            replay()
            assert torch.equal(result, expected)
        assert torch.equal(compute_products(x, *both[1], ahead.begin_step()), expected), "after a captured step"


def test_engine_gives_the_same_tokens(tmp_path: Path) -> None:
    """Prompts have more rows than our own products support, some in captured steps and some not.

    One is scored in a single chunk: with 33 to 384 rows, sums of packed weights may be split differently."""
    from emberline.engine.gpu.boot import boot_from_checkpoint

    tiny.write(tmp_path, tiny.config("llama", **SIZES), dtype=torch.bfloat16, seed=3)
    outputs_by_format: list[list[object]] = []
    for weights in ("plain", "packed"):
        settings = gpu_config(
            max_running=4, max_batch_tokens=2048, kv_tokens=16384, weights=weights, prefix_cache=False
        )
        booted = boot_from_checkpoint(tmp_path, settings)
        outputs_now: list[object] = []
        for i, length in enumerate((700, 701, 690, 1500, 699, 1600, MAX_SCORED_TOKENS)):
            prompt = [3 + (7 * i + 11 * j) % 4000 for j in range(length)]
            scored = 1 if length == MAX_SCORED_TOKENS else None
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logprobs=scored)
            booted.engine.add(Submission(f"r{i}", prompt, params))
            while not booted.engine.idle:
                for output in booted.engine.step():
                    assert output.error is None
                    outputs_now += [*output.tokens, *(p.logprob for p in output.prompt_logprobs or ())]
        assert len(booted.runner._graphs.weight_unpacker._buffers) == (2 if weights == "packed" else 0)
        outputs_by_format.append(outputs_now)
        del booted
    assert outputs_by_format[0] == outputs_by_format[1] and len(outputs_by_format[0]) > 7 * 12
