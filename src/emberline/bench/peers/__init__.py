"""Contenders of `bench cpu`: each a child process in an environment of its own, all speaking peers.wire."""
