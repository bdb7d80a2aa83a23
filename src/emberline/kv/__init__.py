"""The KV cache: block bookkeeping (pool, prefix, manager: torch-free) and its memory (cache)."""
