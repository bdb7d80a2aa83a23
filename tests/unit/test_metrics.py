"""The Prometheus text is well-formed, uses vLLM's names, and its numbers add up."""

from __future__ import annotations

import re

import pytest

from emberline.core.events import SleepStats, SpeculationStats, Stats, TierStats, Timing
from emberline.engine.messages import EngineMessageDecoder, EngineUpdate, encode_message
from emberline.server.metrics import CacheInfo, ModelMetrics, ReplyCounter, render_exposition

LABEL = r'[a-z_]+="(?:[^"\\\n]|\\["\\n])*"'
LINE = re.compile(rf"^[a-z0-9_:]+(\{{{LABEL}(,{LABEL})*\}})? -?[0-9.e+-]+$")


def render(metrics: ModelMetrics, **stats: int) -> str:
    return render_exposition(metrics.families(Stats(**stats), restart_count=2, is_ready=True, block_size=16))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "tiers", "gpu", "cpu"),
    [("cpu", {}, 0, 100), ("cuda", {}, 100, 0), ("cuda", {"host": 7}, 100, 7), ("cpu", {"host": 7, "disk": 9}, 0, 107)],
)
def test_cache_info_equals_engine_settings(device: str, tiers: dict[str, int], gpu: int, cpu: int) -> None:
    stats = Stats(blocks_total=100, tiers={name: TierStats(capacity=size) for name, size in tiers.items()})
    cache = CacheInfo(device, "float8_e4m3fn", False)
    text = render_exposition(
        ModelMetrics("m").families(stats, restart_count=0, is_ready=True, block_size=64, cache=cache)
    )
    (line,) = (line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    assert dict(re.findall(r'([a-z_]+)="([^"]*)"', line)) == {
        "model_name": "m",
        "block_size": "64",
        "cache_dtype": "float8_e4m3fn",
        "enable_prefix_caching": "False",
        "num_gpu_blocks": str(gpu),
        "num_cpu_blocks": str(cpu),
    }


def test_exposition_is_well_formed() -> None:
    metrics = ModelMetrics('odd "name"\\')
    metrics.record_completion("stop", Timing(0.0, 0.5, 1.0, 3.0), 5)
    replies = ReplyCounter()
    replies.count("/v1/models", 200)
    described = set()
    text = render(metrics, blocks_total=4) + render_exposition(
        [*metrics.build_sleep_metrics(SleepStats(), True), replies.family()]
    )
    for line in text.splitlines():
        if line.startswith("#"):
            described.add(line.split()[2])
        else:
            assert LINE.match(line), line
            name = line.partition("{")[0]
            assert re.sub(r"_(bucket|sum|count)$", "", name) in described or name in described, line


def test_counters_gauges_and_histograms() -> None:
    metrics = ModelMetrics("m")
    metrics.record_request(10, 1, 20)
    metrics.record_admission(10, 4)
    metrics.record_completion("length", Timing(arrival=1.0, admitted=1.25, first_token=2.0, finished=4.0), 5)
    metrics.record_completion("abort", Timing(arrival=1.0), 0)
    metrics.record_completion("stop", Timing(arrival=1.0, admitted=1.25, first_token=2.0, finished=2.0), 1)
    for step in (1, 1, 2):
        metrics.record_step(Stats(step=step, step_tokens=7))
    text = render(metrics, running=3, blocks_total=10, blocks_free=4, blocks_cached=1, prefix_hits=4)
    assert 'vllm:num_requests_running{model_name="m"} 3' in text
    assert 'vllm:kv_cache_usage_perc{model_name="m"} 0.5' in text
    assert 'vllm:request_success_total{model_name="m",finished_reason="length"} 1' in text
    assert 'vllm:time_to_first_token_seconds_sum{model_name="m"} 2.0' in text
    assert 'vllm:time_to_first_token_seconds_bucket{model_name="m",le="0.75"} 0' in text
    assert 'vllm:time_to_first_token_seconds_bucket{model_name="m",le="1.0"} 2' in text
    assert 'vllm:request_queue_time_seconds_sum{model_name="m"} 0.5' in text
    assert 'vllm:request_inference_time_seconds_sum{model_name="m"} 3.5' in text
    assert 'vllm:request_time_per_output_token_seconds_sum{model_name="m"} 0.5' in text
    assert 'vllm:request_time_per_output_token_seconds_count{model_name="m"} 1' in text
    assert 'vllm:prompt_tokens_cached_total{model_name="m"} 4' in text
    assert 'vllm:request_prefill_kv_computed_tokens_sum{model_name="m"} 6' in text
    assert 'vllm:iteration_tokens_total_count{model_name="m"} 2' in text
    assert 'emberline:engine_restarts_total{model_name="m"} 2' in text


def test_labelled_families() -> None:
    metrics = ModelMetrics("m")
    metrics.record_admission(10, 4)
    metrics.record_engine_start({"weights": 1.5}, 100, 200)
    metrics.record_step(Stats(step=1, residency=[("lifetime", 3.0), ("reuse_gap", 0.5), ("lifetime", 1.0)]))
    text = render(metrics, waiting=5, deferred=2, prompt_tokens=6)
    assert 'vllm:num_requests_waiting_by_reason{model_name="m",reason="capacity"} 3' in text
    assert 'vllm:num_requests_waiting_by_reason{model_name="m",reason="deferred"} 2' in text
    assert 'vllm:prompt_tokens_by_source_total{model_name="m",source="local_cache_hit"} 4' in text
    assert 'vllm:kv_block_lifetime_seconds_sum{model_name="m"} 4.0' in text
    assert 'vllm:kv_block_reuse_gap_seconds_count{model_name="m"} 1' in text
    assert 'vllm:kv_block_idle_before_evict_seconds_count{model_name="m"} 0' in text
    assert 'emberline:startup_seconds{model_name="m",phase="weights"} 1.5' in text
    assert 'emberline:kv_bytes{model_name="m"} 200' in text


def test_several_models_share_families() -> None:
    """Prometheus takes a family once: described first, and all of its lines together."""
    metrics = {name: ModelMetrics(name) for name in ("a", "b")}
    turns = {"a": SleepStats(wakes=2, wake_bytes=30), "b": SleepStats(wakes=1, sleeps=1, sleep_seconds=0.5)}
    families = []
    for name, one in metrics.items():
        families += [*one.families(Stats(running=len(name)), restart_count=0, is_ready=True, block_size=16)]
        families += [*one.build_sleep_metrics(turns[name], is_awake=name == "a")]
    lines = render_exposition(families).splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) == sum(line.startswith("# HELP") for line in lines)
    family = ""
    for line in lines:
        if line.startswith("#"):
            family = line.split()[2]
        else:
            assert line.startswith(family), line
    text = "\n".join(lines)
    assert 'emberline:model_awake{model_name="a"} 1\nemberline:model_awake{model_name="b"} 0' in text
    assert 'emberline:model_wakes_total{model_name="a"} 2\nemberline:model_wakes_total{model_name="b"} 1' in text
    assert 'emberline:model_wake_bytes_total{model_name="a"} 30' in text
    assert 'emberline:model_sleep_seconds_total{model_name="b"} 0.5' in text


def test_waiting_for_sleeping_model_has_reason() -> None:
    text = render(ModelMetrics("m"), waiting=7, deferred=2, asleep=4)
    for reason, count in (("capacity", 1), ("deferred", 2), ("asleep", 4)):
        assert f'vllm:num_requests_waiting_by_reason{{model_name="m",reason="{reason}"}} {count}' in text


def test_speculation_has_the_names_of_vllm() -> None:
    assert "spec_decode" not in render(ModelMetrics("m"))
    (message,) = EngineMessageDecoder().feed(
        encode_message(EngineUpdate("m", [], Stats(speculation=SpeculationStats(5, 12, 7, [4, 2, 1]))))
    )
    assert isinstance(message, EngineUpdate)
    text = render_exposition(ModelMetrics("m").families(message.stats, restart_count=0, is_ready=True, block_size=16))
    assert [line for line in text.splitlines() if line.startswith("vllm:spec_decode")] == [
        'vllm:spec_decode_num_drafts_total{model_name="m"} 5',
        'vllm:spec_decode_num_draft_tokens_total{model_name="m"} 12',
        'vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 7',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 4',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 2',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="2"} 1',
    ]
