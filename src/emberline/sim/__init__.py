"""A simulated cluster on a virtual clock: production scheduler, KV manager and router, with a cost model of a GPU."""
