"""A gateway's HTTP: requests to calls, replies back, sockets, metrics."""
