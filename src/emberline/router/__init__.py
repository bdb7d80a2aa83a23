"""The router's routing logic: which worker gets a request. Only `worker_client` does I/O; the
policies are pure."""
