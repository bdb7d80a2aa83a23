"""MemoryPlan: sums, errors, and the sizes of known models."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from gpu_settings import gpu_config
from hypothesis import given
from hypothesis import strategies as st

from emberline.bench.gpu import model as bench_model
from emberline.bench.machine_limits import TokenCost
from emberline.core.errors import ModelError, UnsupportedModel
from emberline.core.plan import WorkItem
from emberline.engine import memory
from emberline.engine.gpu.shape import StepShape, captured_shapes
from emberline.engine.memory import (
    RESERVE_BYTES,
    MemoryPlan,
    kv_token_bytes,
    plan_memory,
    weight_bytes,
    weight_matrices_bytes,
)
from emberline.kernels.work_limits import MAX_UNPACKED_WEIGHTS
from emberline.models.config import ModelConfig
from emberline.models.config_outline import outline_of
from emberline.models.weight_matrices import list_weight_matrices

LLAMA_8B = ModelConfig.from_hf(bench_model.LLAMA_8B)
H200 = 141 * 10**9


def make_plan(config: ModelConfig = LLAMA_8B, total: int = H200, **changes: Any) -> MemoryPlan:
    usual: dict[str, Any] = {
        "dtype_bytes": 2,
        "kv_dtype_bytes": 2,
        "block_size": 64,
        "max_running": 256,
        "max_batch_tokens": 8192,
        "max_context": 131072,
    }
    return plan_memory(config, total, **(usual | changes))


def test_llama_8b_on_an_h200() -> None:
    found = make_plan()
    assert found.weights == pytest.approx(8_030_261_248 * 2, rel=1e-4)  # the published number of parameters
    assert kv_token_bytes(LLAMA_8B, 2) == 131072
    assert found.kv_tokens > 850_000
    narrow = make_plan(kv_dtype_bytes=1)  # half as large, but chunks need a bf16 copy
    widened = (narrow.scratch - found.scratch) // (131072 // 2)
    assert 0 < widened < 0.01 * narrow.kv_tokens
    assert narrow.kv_tokens == pytest.approx(2 * found.kv_tokens - widened, abs=2 * 64)


@given(
    total=st.integers(24 << 30, 200 << 30),
    block_size=st.sampled_from([16, 32, 64]),
    max_running=st.integers(1, 512),
    max_batch_tokens=st.integers(1, 8192),
    max_context=st.integers(1, 131072),
    kv_dtype_bytes=st.sampled_from([1, 2, 4]),
)
def test_parts_add_up_and_blocks_are_whole(total: int, **changes: int) -> None:
    found = make_plan(total=total, **changes)
    assert sum(size for _, size in found.named_sizes()) == total
    assert all(size > 0 for _, size in found.named_sizes())
    assert found.fixed_bytes + found.kv_bytes <= total * 0.98
    block = kv_token_bytes(LLAMA_8B, changes["kv_dtype_bytes"]) * found.block_size
    assert found.kv_bytes == found.kv_blocks * block
    assert found.kv_tokens == found.kv_blocks * found.block_size
    assert found.fixed_bytes + found.kv_bytes + block > int(total * 0.98)  # one more would not fit


def test_larger_settings_reduce_the_kv_cache() -> None:
    base = make_plan()
    for name, more in {
        "dtype_bytes": 4,
        "max_running": 512,
        "max_batch_tokens": 16384,
        "max_context": 1 << 20,
    }.items():
        assert make_plan(**{name: more}).kv_tokens < base.kv_tokens, name
    assert make_plan(replace(LLAMA_8B, ffn=2 * LLAMA_8B.ffn)).activations > base.activations
    assert make_plan(replace(LLAMA_8B, heads=256, kv_heads=256)).activations > base.activations


def test_weights_follow_the_config() -> None:
    one = weight_bytes(LLAMA_8B, 2)
    assert weight_bytes(LLAMA_8B, 4) < 2 * one  # norms are float32 in both cases
    assert one - weight_bytes(replace(LLAMA_8B, tie_embeddings=True), 2) == 2 * 128256 * 4096
    assert weight_bytes(replace(LLAMA_8B, qkv_bias=True), 2) - one == 32 * 4 * 6144
    assert weight_bytes(replace(LLAMA_8B, o_bias=True), 2) - one == 32 * 4 * 4096
    assert weight_bytes(replace(LLAMA_8B, mlp_bias=True), 2) - one == 32 * 4 * (2 * 14336 + 4096)
    assert weight_bytes(replace(LLAMA_8B, qk_norm=True), 2) - one == 32 * 4 * 256


MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


@pytest.mark.parametrize(
    ("model", "published", "of_a_token"), [(MIXTRAL_8X7B, 46.7e9, 12.9e9), (QWEN3_30B_A3B, 30.5e9, 3.3e9)]
)
def test_experts_are_counted(model: dict[str, Any], published: float, of_a_token: float) -> None:
    config = ModelConfig.from_hf(model)
    assert weight_bytes(config, 2) == pytest.approx(published * 2, rel=2e-3)
    cost = TokenCost.from_config(config)
    assert cost.layers + 2 * cost.head == pytest.approx(of_a_token, rel=2e-2)
    plan = memory.plan_engine_memory(config, gpu_config(), H200, "bfloat16")
    assert plan.weights == weight_bytes(config, 2) and plan.kv_tokens > 0


@pytest.mark.parametrize(("change", "message"), [("both", "weights is both"), ("exact", "exact is set")])
def test_experts_are_refused_by_setting(change: str, message: str) -> None:
    settings = gpu_config(exact=True) if change == "exact" else gpu_config(weights=change)
    with pytest.raises(UnsupportedModel, match=message):
        memory.plan_engine_memory(ModelConfig.from_hf(QWEN3_30B_A3B), settings, H200, "bfloat16")


def test_packed_experts_are_planned() -> None:
    """Routers are never packed, nor experts with biases, nor small matrices of attention beside experts."""
    config = ModelConfig.from_hf(QWEN3_30B_A3B)
    plain, packed = (memory.weight_bytes(config, 2, packed=packed) for packed in (False, True))
    attention = [part for part in list_weight_matrices(outline_of(config)) if part.kind == "attention"]
    assert len(attention) == 2 * 48 and all(part.is_faster_unpacked for part in attention)
    unpacked = 2 * sum(part.num_weights for part in attention)
    assert packed - unpacked == pytest.approx((plain - unpacked) * 12.2 / 16, rel=5e-3)
    assert not any(part.is_faster_unpacked for part in list_weight_matrices(outline_of(LLAMA_8B)))
    plan = memory.plan_engine_memory(config, gpu_config(weights="packed"), H200, "bfloat16", packed=True)
    assert plan.weights == packed
    parts = {part.kind: part for part in list_weight_matrices(outline_of(config))}
    assert weight_matrices_bytes(parts["router"], 2, packed=True) == 2 * 128 * 2048
    experts = replace(outline_of(config).experts or pytest.fail("no experts"), has_biases=True)
    biased = list_weight_matrices(replace(outline_of(config), experts=experts))
    assert all(part.is_never_packed for part in biased if part.kind == "routed experts")


def test_configured_kv_tokens_are_used() -> None:
    found = make_plan(kv_tokens=100_001)
    assert found.kv_tokens == 100_032
    assert found.spare_bytes > H200 // 2
    with pytest.raises(ModelError, match="does not fit") as refused:
        make_plan(kv_tokens=2_000_000)
    assert "--kv-memory" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("total", "changes", "hint"),
    [
        (16 << 30, {}, "smaller model"),
        (24 << 30, {"max_batch_tokens": 65536}, "max-batch-tokens"),
        (RESERVE_BYTES, {}, "smaller model"),
    ],
)
def test_error_names_the_sizes(total: int, changes: dict[str, int], hint: str) -> None:
    with pytest.raises(
        ModelError, match=rf"of {total / 2**30:.2f} GiB are usable.* too little.*weights 14.96"
    ) as error:
        make_plan(total=total, **changes)
    assert hint in (error.value.hint or "")


def test_plan_as_text() -> None:
    text = str(make_plan())
    assert "weights" in text and "14.96 GiB" in text and "kv cache" in text
    assert f"{make_plan().kv_tokens} tokens" in text


def test_scratch_includes_unpacked_weights() -> None:
    """Steps with many rows need two whole matrices of a layer, of any size, and a part of the output head."""

    def more(config: ModelConfig) -> int:
        return make_plan(config, packed=True).scratch - make_plan(config).scratch

    widest = 2 * LLAMA_8B.ffn * LLAMA_8B.hidden
    assert more(LLAMA_8B) == 2 * (2 * widest + MAX_UNPACKED_WEIGHTS)
    assert more(replace(LLAMA_8B, ffn=2 * LLAMA_8B.ffn)) == 2 * (4 * widest + MAX_UNPACKED_WEIGHTS)
    assert more(replace(LLAMA_8B, vocab=1000)) == 2 * (2 * widest + 1000 * LLAMA_8B.hidden)
    assert make_plan(LLAMA_8B, both=True).scratch == make_plan(LLAMA_8B).scratch, "there is nothing to unpack"


def test_both_formats_take_the_memory_of_both_except_the_embedding() -> None:
    head = LLAMA_8B.vocab * LLAMA_8B.hidden
    plain, packed, both = (make_plan(LLAMA_8B, **kept).weights for kept in ({}, {"packed": True}, {"both": True}))
    assert both == pytest.approx(plain + packed - head * 12.2 / 8, rel=1e-3)
    tied = replace(LLAMA_8B, tie_embeddings=True)
    plain, packed, both = (make_plan(tied, **kept).weights for kept in ({}, {"packed": True}, {"both": True}))
    assert both == pytest.approx(plain + packed, rel=1e-3)
    odd = replace(LLAMA_8B, vocab=LLAMA_8B.vocab + 1)  # a head that cannot be packed is kept once
    assert make_plan(odd, both=True).weights - make_plan(LLAMA_8B, both=True).weights < -1.4 * head


@given(st.integers(1, 300), st.integers(1, 4096), st.randoms(use_true_random=False))
def test_graphs_of_all_shapes_are_counted(running: int, batch: int, rng: Random) -> None:
    counted = captured_shapes(running, batch)
    singles = rng.randint(0, min(running, batch))
    left = min(running, batch) - singles
    chunks = [rng.randint(1, max(1, (batch - singles) // left)) for _ in range(rng.randint(0, left))]
    if singles or chunks:
        found = StepShape.for_work(singles, [_work(count) for count in chunks])
        assert found is None or found in counted


def test_each_kind_of_step_has_a_planned_shape() -> None:
    assert {
        StepShape(1, 0, 0),
        StepShape(256, 0, 0),
        StepShape(0, 8, 128),
        StepShape(64, 32, 1088),
    } <= captured_shapes(256, 8192)
    more = len(captured_shapes(256, 8192)) - len(captured_shapes(64, 8192))
    # The largest shapes have 256 + 1024 and 64 + 1024 tokens, padded to a multiple of 128.
    activations = 2 * 128 * (2 * LLAMA_8B.hidden + 3 * LLAMA_8B.ffn)
    found = make_plan().graphs - make_plan(max_running=64).graphs
    assert more > 0 and found == more * memory.GRAPH_BYTES + activations


def _work(tokens: int) -> WorkItem:
    return WorkItem("a", 0, [1] * tokens, [0], samples=True)


@pytest.mark.parametrize(("captured", "rows"), [(1, 128 + 64), (0, 2 * 128)])
def test_scratch_memory_of_a_draft_model_is_counted(captured: int, rows: int) -> None:
    """That of latent attention: for each work item and each row, partial results of up to two queries of 128 heads.

    A draft model that reads tokens computes two rows for each request."""
    latent = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    fields = {**bench_model.LLAMA_8B, **latent, "model_type": "deepseek_v2", "v_head_dim": 128}
    fields |= {"num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 1}
    fields |= {"n_routed_experts": 4, "num_experts_per_tok": 1, "first_k_dense_replace": 1, "rope_scaling": None}
    config = ModelConfig.from_hf({name: value for name, value in fields.items() if name != "architectures"})
    draft = memory.DraftMemory.for_model(10**9, config, captured)
    changes = {"max_running": 128, "max_new_tokens": 5}
    with_draft, without = make_plan(draft=draft, **changes), make_plan(**changes)
    places = 2 * rows + 5 * 2 * 192 // 2  # the keys of long rows are cut, for two programs of 64 heads each
    assert with_draft.scratch - without.scratch == places * 2 * 128 * (576 + 2) * 4
    assert with_draft.weights - without.weights == 10**9
    assert with_draft.logits - without.logits == 128 * LLAMA_8B.vocab * 4
    # Its attention has more values than the target's feed-forward network, beside 4 copies of its inputs.
    values = 128 * (128 + 64 + 576 + 512 + 128 + 128 + 128) + 2 * 576
    own = 2 * 8192 * ((3 + 4) * config.hidden + values)
    states = with_draft.activations - own
    assert own > without.activations
    assert states == (2 * 2 * config.hidden * (8192 + 128 + 64) if captured else 0)


def test_memory_of_other_processes_is_not_used() -> None:
    total, context = 141 << 30, 1 << 29
    assert memory.bytes_used_by_other_processes(total, total - context, 0) == 0
    assert memory.bytes_used_by_other_processes(total, total - context - (20 << 30), 20 << 30) == 0
    assert memory.bytes_used_by_other_processes(total, 9 << 30, 30 << 30) == 102 << 30
    assert memory.usable_bytes(total, 0.5, 20 << 30) == total // 2, "other processes use what is left anyway"
    assert memory.usable_bytes(total, 0.98, 20 << 30) == 121 << 30
    alone, beside = make_plan(utilization=0.5), make_plan(utilization=0.5, other_bytes=20 << 30)
    assert beside.kv_bytes == alone.kv_bytes and beside.total == H200 - (20 << 30)
    assert make_plan(other_bytes=20 << 30).kv_bytes < make_plan().kv_bytes - (15 << 30)
