"""Faults on purpose: a cluster of real processes, requests, what goes wrong with them, and a judge."""
