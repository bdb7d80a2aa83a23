"""Decides where a request is sent: dynamic routes (graphs that select a model), pools and lists of steps."""
