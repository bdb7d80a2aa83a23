"""A fake provider without a model, in every dialect (wire format), for tests and benchmarks."""
