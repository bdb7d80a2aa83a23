"""Benchmarks. Each prints a table and, as its last line, the result as JSON; most also measure a peer."""
