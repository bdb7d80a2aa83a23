"""Token usage, prices and costs of requests."""
