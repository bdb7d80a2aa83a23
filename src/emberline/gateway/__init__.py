"""One URL in front of many providers: cache, limits, cost, keys, logs, fallback. No torch, no engine."""
