"""Benchmarks. Each prints a table and, as its last line, the result as JSON; most measure a peer in the same run."""
