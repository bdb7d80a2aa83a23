"""Contenders of `bench cpu`: each a child process in its own environment that uses `child_protocol`."""
