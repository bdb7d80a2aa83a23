"""The metrics of the gateway: cache, log, semantic cache (with shadow mode) and shared limits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from emberline.core.clock import SystemClock
from emberline.gateway.cache.semantic import SemanticStats
from emberline.gateway.http.gateway_metrics import GatewayMetrics
from emberline.gateway.layers.caching import CacheStats
from emberline.gateway.limits.base import LimiterStats
from emberline.gateway.limits.local import LocalLimiter
from emberline.server.metrics import render_exposition

JOURNAL: Any = SimpleNamespace(written_count=1, dropped_count=2, failures=3, queue_length=4)
CACHE = CacheStats(hits=5, misses=6, shared=7, stored=8, too_large=9)
SEMANTIC = SimpleNamespace(stats=SemanticStats(lookups=10, similar=11, served=12, compared=13, disagreed=14))
SHARED = SimpleNamespace(stats=LimiterStats(reserved=15, degraded=16, pending_settlements=17, lost_settlements=18))


def exposed_metrics(semantic: Any, limiter: Any) -> dict[str, int]:
    cached: Any = SimpleNamespace(stats=CACHE, semantic=semantic)
    text = render_exposition(GatewayMetrics(SystemClock(), [], JOURNAL, cached, limiter, None).families())
    rows = [line.split() for line in text.splitlines() if not line.startswith("#") and "{" not in line]
    return {name.removeprefix("emberline:gateway_").removesuffix("_total"): int(value) for name, value in rows}


def test_every_counter_is_exposed() -> None:
    assert exposed_metrics(SEMANTIC, SHARED) == {
        "open_requests": 0,
        "log_written": 1,
        "log_dropped": 2,
        "log_failures": 3,
        "log_queued": 4,
        "cache_hits": 5,
        "cache_misses": 6,
        "cache_shared": 7,
        "cache_stored": 8,
        "cache_too_large": 9,
        "semantic_asked": 10,
        "semantic_near": 11,
        "semantic_served": 12,
        "semantic_compared": 13,
        "semantic_disagreed": 14,
        "limits_reserved": 15,
        "limits_degraded": 16,
        "limits_owed": 17,
        "limits_lost": 18,
    }


@pytest.mark.parametrize("feature", ["semantic", "limits"])
def test_unused_features_expose_no_metrics(feature: str) -> None:
    names = exposed_metrics(None, SHARED) if feature == "semantic" else exposed_metrics(SEMANTIC, LocalLimiter())
    assert not [name for name in names if name.startswith(feature)]
