"""A worker's HTTP: calls in, deltas out, and what other workers and routers ask of it."""
