"""The server process of a worker: its HTTP endpoints, from a parsed request to the reply."""
