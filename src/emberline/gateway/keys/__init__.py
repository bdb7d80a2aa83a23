"""Gateway keys, which identify callers, and provider keys, which requests to providers are sent with."""
