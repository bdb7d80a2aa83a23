"""A simulated cluster on a virtual clock. Scheduler, KV manager and router are the real ones; only GPUs are
simulated."""
