"""KV transfer: copies blocks of keys and values from one engine's cache into another's."""
