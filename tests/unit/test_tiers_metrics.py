"""Metrics of KV tiers, and that they pass through the engine process's messages unchanged."""

from __future__ import annotations

from emberline.core.events import Stats, TierStats
from emberline.engine.messages import EngineMessageDecoder, EngineUpdate, encode_message
from emberline.server.metrics import ModelMetrics, render_exposition


def test_metrics_by_tier() -> None:
    tier_stats = {"host": TierStats(blocks=3, hit_tokens=32), "disk": TierStats(on=False, errors=2, hit_tokens=16)}
    (message,) = EngineMessageDecoder().feed(encode_message(EngineUpdate("m", [], Stats(tiers=tier_stats))))
    assert isinstance(message, EngineUpdate) and message.stats.tiers == tier_stats
    text = render_exposition(ModelMetrics("m").families(message.stats, restart_count=0, is_ready=True, block_size=16))
    for line in (
        'emberline:kv_tier_hit_tokens_total{model_name="m",tier="host"} 32.0',
        'emberline:kv_tier_hit_tokens_total{model_name="m",tier="disk"} 16.0',
        'emberline:kv_tier_on{model_name="m",tier="host"} 1.0',
        'emberline:kv_tier_on{model_name="m",tier="disk"} 0.0',
        'emberline:kv_tier_errors_total{model_name="m",tier="disk"} 2.0',
    ):
        assert line in text.splitlines()
    assert Stats.total([message.stats, message.stats]).tiers == {}
    without = render_exposition(ModelMetrics("m").families(Stats(), restart_count=0, is_ready=True, block_size=16))
    assert "kv_tier" not in without
