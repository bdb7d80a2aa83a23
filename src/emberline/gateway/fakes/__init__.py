"""A fake provider without a model, in every dialect, for tests and benchmarks."""
