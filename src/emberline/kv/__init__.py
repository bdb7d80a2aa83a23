"""The KV cache: which request holds which block (pool, prefix, manager; no torch), and the memory itself (cache)."""
