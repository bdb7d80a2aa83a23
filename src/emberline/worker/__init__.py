"""The HTTP side of a worker: API calls, replies, and the endpoints for routers and other workers."""
