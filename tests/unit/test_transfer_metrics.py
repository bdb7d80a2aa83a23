"""KV transfers in /metrics, /stats and heartbeats."""

from __future__ import annotations

from emberline.core.events import Stats, TransferStats
from emberline.engine.messages import EngineMessageDecoder, EngineUpdate, encode_message
from emberline.server.metrics import ModelMetrics, render_exposition
from emberline.worker.transfer_metrics import build_transfer_metrics

EXPECTED = TransferStats(
    pulls=4, pulled_bytes=1000, pull_seconds=0.5, copy_seconds=0.25, hidden_seconds=0.125,
    pull_failures={"peer_lost": 2, "bad_transfer": 1}, reached={"tcp": 4}, passed_over={"cuda": 3},
    hit_tokens=64, published=3, ended={"acknowledged": 2, "expired": 1},
    verified_blocks=9, leases=1, pinned_blocks=5, pinned_by_age={"1-10": 5}, oldest_lease=2.5, quarantined_blocks=7,
)  # fmt: skip


def test_each_statistic_has_a_metric() -> None:
    (message,) = EngineMessageDecoder().feed(encode_message(EngineUpdate("m", [], Stats(transfer=EXPECTED))))
    assert isinstance(message, EngineUpdate) and message.stats.transfer == EXPECTED
    metrics = ModelMetrics("m")
    lines = render_exposition(build_transfer_metrics(metrics.labels, message.stats.transfer)).splitlines()
    for line in (
        'vllm:nixl_xfer_time_seconds_sum{model_name="m"} 0.5',
        'vllm:nixl_xfer_time_seconds_count{model_name="m"} 4',
        'vllm:nixl_bytes_transferred_sum{model_name="m"} 1000.0',
        'vllm:nixl_num_failed_transfers_total{model_name="m"} 3',
        'vllm:nixl_num_kv_expired_reqs_total{model_name="m"} 1',
        'vllm:external_prefix_cache_hits_total{model_name="m"} 64',
        'emberline:kv_transfer_pull_failures_total{model_name="m",code="peer_lost"} 2',
        'emberline:kv_transfer_reached_total{model_name="m",transport="tcp"} 4',
        'emberline:kv_transfer_passed_over_total{model_name="m",transport="cuda"} 3',
        'emberline:kv_transfer_leases_ended_total{model_name="m",how="acknowledged"} 2',
        'emberline:kv_transfer_oldest_lease_seconds{model_name="m"} 2.5',
        'emberline:kv_transfer_copy_seconds_total{model_name="m"} 0.25',
        'emberline:kv_transfer_hidden_seconds_total{model_name="m"} 0.125',
        'emberline:kv_transfer_pinned_blocks{model_name="m"} 5',
        'emberline:kv_transfer_pinned_blocks_by_age{model_name="m",seconds="1-10"} 5',
        'emberline:kv_transfer_verified_blocks_total{model_name="m"} 9',
        'emberline:kv_transfer_quarantined_blocks{model_name="m"} 7',
    ):
        assert line in lines
    sources = render_exposition(metrics.families(message.stats, restart_count=0, is_ready=True, block_size=16))
    assert 'vllm:prompt_tokens_by_source_total{model_name="m",source="external_kv_transfer"} 64' in sources


def test_statistics_of_several_engines_add_up() -> None:
    other = TransferStats(pulls=1, pull_failures={"peer_lost": 1, "timeout": 1}, oldest_lease=1.0, leases=2)
    total = Stats.total([Stats(transfer=EXPECTED), Stats(), Stats(transfer=other)]).transfer
    assert total is not None and (total.pulls, total.leases, total.oldest_lease) == (5, 3, 2.5)
    assert total.pull_failures == {"peer_lost": 3, "bad_transfer": 1, "timeout": 1}
    assert total.ended == EXPECTED.ended and Stats.total([Stats()]).transfer is None
