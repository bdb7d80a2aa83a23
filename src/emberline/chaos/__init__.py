"""Fault injection into a cluster of real processes that serves requests with known answers."""
