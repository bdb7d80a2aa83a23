"""A cluster on a virtual clock: scheduler, KV manager and router as in production, a cost model for the device."""
