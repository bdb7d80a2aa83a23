"""KV tiers: host memory, disk and a shared store that keep blocks evicted from the main cache."""
