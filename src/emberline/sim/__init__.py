"""A simulated cluster on a virtual clock, with the real scheduler, KV manager and router. GPUs are simulated."""
