"""Keys and values: who holds which block (pool, prefix, manager: torch-free) and the memory itself (cache)."""
