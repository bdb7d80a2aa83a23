"""Keys of two kinds: gateway keys identify callers; provider keys authenticate requests to providers."""
