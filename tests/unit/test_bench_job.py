"""The request sets are those that the anchors were measured on; the rates are what their names say."""

from __future__ import annotations

import pytest

from emberline.bench import workload
from emberline.bench.bench_task import BenchTask
from emberline.bench.job import BenchJob, TokenTimeline
from emberline.bench.machine_limits import MachineLimits, TokenCost
from emberline.core.errors import InvalidRequest
from emberline.models.config import ModelConfig

SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def test_chat_is_the_set_of_the_anchors() -> None:
    sizes = workload.draw_chat_lengths(1000)
    assert (sum(p for p, _ in sizes), sum(o for _, o in sizes)) == (247_095, 222_584)


def test_mix_is_seeded_and_within_its_bounds() -> None:
    job = workload.make_mixed_job(64, 49152)
    assert job == workload.make_mixed_job(64, 49152)
    assert len(job.prompts) == 64
    assert all(8 <= len(prompt) <= 512 for prompt in job.prompts)
    assert all(8 <= output <= 128 for output in job.outputs)
    assert len(set(map(len, job.prompts))) > 30


def test_a_decode_job_gives_as_many_steps_as_it_says() -> None:
    job = workload.make_decode_job(3, 1000, context_tokens=10, decode_steps=4)
    assert [len(prompt) for prompt in job.prompts] == [10, 10, 10]
    assert job.outputs == [5, 5, 5]  # the first comes with the prefill
    assert len({tuple(prompt) for prompt in job.prompts}) == 3


def test_decode_counts_only_while_all_decode() -> None:
    # The first request runs alone until 3.0, when the second has its first token; it ends at 5.0.
    timeline = TokenTimeline([[1.0, 2.0, 3.0, 4.0, 5.0], [3.0, 4.0, 5.0, 5.5, 6.0]])
    assert timeline.full_batch_period == (3.0, 5.0)
    assert timeline.decode_rate() == 2.0  # four tokens in two seconds
    assert timeline.median_step_seconds() == 1.0  # and not the half second of the second one's last steps
    assert timeline.output_rate() == 10 / 6
    assert timeline.prefill_rate(BenchJob([[1] * 6, [1] * 9], [5, 5])) == 5.0


def test_limits_follow_from_bytes_and_operations() -> None:
    cost = TokenCost.from_config(ModelConfig.from_hf(SMOLLM2))
    assert cost.weight_bytes == 2 * (30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536) + 49152 * 576)  # 269 MB
    assert cost.kv_bytes == 30 * 2 * 192 * 2
    fast = MachineLimits({"read_sum": 26.9, "matmul_float32": 1e9})  # arithmetic is free: memory is the limit
    assert cost.max_decode_rate(fast, 1, 0) == pytest.approx(26.9e9 / cost.weight_bytes)
    assert cost.max_decode_rate(fast, 8, 0) == pytest.approx(8 * 26.9e9 / cost.weight_bytes)
    slow = MachineLimits({"read_sum": 1e9, "matmul_float32": 10.0})  # memory is free: arithmetic is the limit
    one = 10e9 / (2 * cost.layers)
    assert cost.max_prefill_rate(slow, 512) < one
    assert cost.max_prefill_rate(slow, 512) > cost.max_prefill_rate(slow, 2048)  # attention grows
    job = workload.make_mixed_job(8, 1000)
    assert cost.max_output_rate(slow, job) < 10e9 / (2 * (cost.layers + cost.head))


def test_ceilings_keep_the_best_of_each_method() -> None:
    one, two = (
        MachineLimits({"read_sum": 3.0, "matmul_float32": 5.0}),
        MachineLimits({"read_sum": 4.0, "matmul_float32": 4.0}),
    )
    both = one.merge_maximum(two)
    assert (both.bandwidth, both.flops) == (4e9, 5e9)


def test_a_task_is_named_as_it_is_asked_for() -> None:
    for name in ("prefill_512", "decode_4", "mix_8"):
        assert BenchTask.from_name(name, 1000).name == name
    for name in ("prefil_3", "decode", "decode_", "decode_x", "mix_0", ""):
        with pytest.raises(InvalidRequest, match=f"unknown benchmark task '{name}'"):
            BenchTask.from_name(name, 1000)
