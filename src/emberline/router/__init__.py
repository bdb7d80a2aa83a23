"""The router's choice of a worker for each request, as pure functions and data structures.

Only the module `worker_client` and the package `http` do I/O."""
