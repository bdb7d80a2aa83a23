"""Every kind of attention that model families have, on a GPU: windows, chunks, sinks, capped scores, all head sizes.

Steps are planned and computed as an engine does it, and compared with the CPU's reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton_cases
from torch import Tensor
from triton_cases import BF16, F32, FP8, AttentionCase

from emberline.kernels.arguments import AttentionInputs, AttentionMetadata
from emberline.kernels.attention_plan import AttentionPlan, AttentionPlanner, PlannerOptions
from emberline.kernels.backend import backend_of
from emberline.kernels.reference import ReferenceBackend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = "cuda"
Lengths = list[tuple[int, int]]

GPT_OSS: dict[str, Any] = {"window": 128, "has_sinks": True}
LLAMA4: dict[str, Any] = {"window": 256, "chunked": True}
# Query heads, KV heads and head size, and kind.
KINDS: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((64, 8, 64), GPT_OSS),
    ((64, 8, 64), {"has_sinks": True}),
    ((8, 4, 256), {"window": 100, "softcap": 5.0}),
    ((4, 1, 256), {"softcap": 5.0}),
    ((40, 8, 128), LLAMA4),
    ((40, 8, 128), {}),
    ((32, 32, 96), {"window": 300}),
    ((24, 8, 128), {"softcap": 3.0, "has_sinks": True, **LLAMA4}),
    ((8, 2, 80), {}),
    ((32, 1, 192), {"window": 70}),
    ((32, 1, 128), {}),
    ((71, 1, 64), {}),
]
IDS = ["-".join(["x".join(map(str, heads)), *kind]) for heads, kind in KINDS]
WINDOWED = [each for each in KINDS if "window" in each[1]]
WINDOWED_IDS = [name for name, each in zip(IDS, KINDS, strict=True) if "window" in each[1]]
# Padding is behind all other rows of one token, as in an engine: the query of such a row is the token of its index.
SINGLES: Lengths = [(0, 1), (1, 1), (63, 1), (64, 1), (2000, 1), (777, 1), (255, 1), (256, 1), (0, 0), (0, 0)]
DRAFTED: Lengths = [(0, 1), (62, 3), (127, 4), (2000, 2), (0, 0), (254, 4), (256, 1), (1000, 3), (0, 0)]
CHUNKS: Lengths = [(0, 40), (64, 130), (300, 3), (511, 257), (0, 1), (1000, 100)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def random_case(
    dtype: torch.dtype, cache: torch.dtype, lengths: Lengths, heads: tuple[int, int, int], **kind: Any
) -> AttentionCase:
    return AttentionCase.random(GPU, dtype, cache, lengths, heads, garbage=99.0, **kind)


def make_planner(case: AttentionCase, max_queries: int = 4) -> AttentionPlanner:
    layer, keys = case.inputs.layer, case.inputs.keys
    heads = layer.q_heads, layer.kv_heads, layer.head_dim
    options = PlannerOptions(max_queries=max_queries)
    return AttentionPlanner(heads, keys[None], case.inputs.qkv.dtype, len(case.lengths), options)


def make_plan(planner: AttentionPlanner, lengths: Lengths, decode_rows: int, **padding: int) -> AttentionPlan:
    context, counts = (np.array(numbers, np.int32) for numbers in zip(*lengths, strict=True))
    most = max(1, *counts[:decode_rows].tolist()) if decode_rows else 1
    return planner.plan(
        context, counts, decode_rows, lambda array: torch.from_numpy(array).to(GPU), max_queries=most, **padding
    )


def compute(case: AttentionCase, decode_rows: int) -> Tensor:
    plan = make_plan(make_planner(case), case.lengths, decode_rows)
    with torch.inference_mode():
        return backend_of(case.inputs.qkv).paged_attention(case.inputs, plan)


def compute_reference(case: AttentionCase) -> Tensor:
    """Return the result of the reference backend, which keeps the keys of a block transposed."""
    qkv, layer, keys, values, metadata = case.inputs
    tables = metadata.block_tables.cpu().clone()
    tables[tables == 1 << 30] = 0
    k, v = (cache.float().cpu().nan_to_num() for cache in (keys, values))
    panels = k.transpose(2, 3).contiguous().view(k.shape)
    sinks = None if layer.sinks is None else layer.sinks.cpu()
    on_cpu = AttentionMetadata(
        metadata.positions, metadata.slots, metadata.query_start.cpu(), metadata.context.cpu(), tables
    )
    inputs = AttentionInputs(qkv.float().cpu(), replace(layer, sinks=sinks), panels, v, on_cpu)
    return ReferenceBackend("test").paged_attention(inputs)


@pytest.mark.parametrize(("heads", "kind"), KINDS, ids=IDS)
@pytest.mark.parametrize(("dtype", "cache"), [(BF16, BF16), (BF16, FP8)], ids=["bf16", "fp8"])
def test_a_mixed_step_equals_dense_attention(
    heads: tuple[int, int, int], kind: dict[str, Any], dtype: torch.dtype, cache: torch.dtype
) -> None:
    for decode in (SINGLES, DRAFTED if heads[0] // heads[1] <= 8 else SINGLES[:3]):
        case = random_case(dtype, cache, [*decode, *CHUNKS], heads, **kind)
        case.check(compute(case, len(decode)))


@pytest.mark.parametrize(("heads", "kind"), KINDS, ids=IDS)
def test_a_step_equals_the_reference(heads: tuple[int, int, int], kind: dict[str, Any]) -> None:
    lengths = [(0, 1), (130, 1), (700, 1), (0, 70), (300, 33)]
    case = random_case(F32, F32, lengths, heads, block=32, **kind)
    torch.testing.assert_close(compute(case, 3).cpu(), compute_reference(case), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "kind"), KINDS, ids=IDS)
@pytest.mark.parametrize("cache", [BF16, FP8])
def test_decode_over_long_contexts_with_many_parts(
    heads: tuple[int, int, int], kind: dict[str, Any], cache: torch.dtype
) -> None:
    long = {**kind, "window": 40 * kind["window"]} if "window" in kind else kind
    for lengths in ([(20_000, 1)], [(9000, 1), (30, 1), (8191, 1), (16_384, 1)]):
        case = random_case(BF16, cache, lengths, heads, **long)
        case.check(compute(case, len(lengths)))


@pytest.mark.parametrize(("heads", "kind"), [KINDS[0], KINDS[2], KINDS[5]], ids=[IDS[0], IDS[2], IDS[5]])
@pytest.mark.parametrize("block", [16, 32, 128])
def test_steps_with_any_block_size(heads: tuple[int, int, int], kind: dict[str, Any], block: int) -> None:
    case = random_case(BF16, BF16, [*SINGLES, *CHUNKS], heads, block=block, **kind)
    case.check(compute(case, len(SINGLES)))


def fill_foreign_blocks(case: AttentionCase) -> None:
    """Let all entries of block tables that a request does not need name a block of NaN."""
    tables, keys, values = case.inputs.metadata.block_tables, case.inputs.keys, case.inputs.values
    used = torch.zeros(len(keys), dtype=torch.bool)
    used[tables[tables != 1 << 30].long().cpu()] = True
    foreign = (~used).nonzero().flatten().to(GPU)
    for cache in (keys, values):
        if cache.dtype == FP8:
            cache.view(torch.uint8)[foreign] = 0x7F
        else:
            cache[foreign] = torch.nan
    assert keys[foreign[0]].float().isnan().all()
    tables[tables == 1 << 30] = foreign[0].int()


@pytest.mark.parametrize(("heads", "kind"), WINDOWED, ids=WINDOWED_IDS)
@pytest.mark.parametrize(("cache", "block"), [(BF16, 16), (BF16, 64), (BF16, 128), (FP8, 16)])
def test_blocks_before_a_window_may_contain_nan(
    heads: tuple[int, int, int], kind: dict[str, Any], cache: torch.dtype, block: int
) -> None:
    """They belong to other requests. A weight of 0 does not help: 0 * NaN is NaN."""
    for decode in (SINGLES, DRAFTED if heads[0] // heads[1] <= 8 else SINGLES[:3]):
        case = random_case(BF16, cache, [*decode, *CHUNKS], heads, block=block, **kind)
        fill_foreign_blocks(case)
        case.check(compute(case, len(decode)))


@pytest.mark.parametrize(
    ("heads", "kind"), [KINDS[0], KINDS[3], KINDS[7], KINDS[8]], ids=[IDS[0], IDS[3], IDS[7], IDS[8]]
)
@pytest.mark.parametrize("cache", [BF16, FP8])
def test_split_decode_in_triton(heads: tuple[int, int, int], kind: dict[str, Any], cache: torch.dtype) -> None:
    """The Triton kernel reads no key that it need not, so the rest of the cache may even be NaN."""
    for lengths in (SINGLES, DRAFTED, [(20_000, 1), (5000, 1)]):
        triton_cases.check_decode(GPU, BF16, cache, lengths, heads, pdl=True, **kind)


@pytest.mark.parametrize(("heads", "kind"), KINDS, ids=IDS)
def test_a_captured_step_equals_an_uncaptured_one(heads: tuple[int, int, int], kind: dict[str, Any]) -> None:
    """The graph is captured on padding only, and replayed for rows of other lengths."""
    rows, chunks = len(SINGLES), len(CHUNKS)
    case = random_case(BF16, BF16, [*SINGLES, *CHUNKS], heads, **kind)
    qkv, layer, keys, values, metadata = case.inputs
    planner, padding = make_planner(case), {"min_tiles": 20}
    plan = make_plan(planner, [(0, 0)] * (rows + chunks), rows, **padding)
    later = make_plan(planner, case.lengths, rows, **padding)
    static = AttentionMetadata(
        metadata.positions,
        metadata.slots,
        torch.zeros_like(metadata.query_start),
        torch.zeros_like(metadata.context),
        metadata.block_tables,
    )
    backend, inputs = backend_of(qkv), AttentionInputs(qkv, layer, keys, values, static)
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        backend.paged_attention(inputs, plan)  # compiles
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = backend.paged_attention(inputs, plan)
        static.query_start.copy_(metadata.query_start)
        static.context.copy_(metadata.context)
        for old, new in ((plan.prefill_tiles, later.prefill_tiles), (plan.prefill_sms, later.prefill_sms)):
            if old is not None and new is not None:
                old.copy_(new)
        assert plan.decode_work is not None and later.decode_work is not None
        plan.decode_work.data.copy_(later.decode_work.data)
        for _ in range(2):
            graph.replay()
        stream.synchronize()
        whole = backend.paged_attention(case.inputs, later)
        stream.synchronize()
    assert torch.equal(out, whole)
    case.check(out)
