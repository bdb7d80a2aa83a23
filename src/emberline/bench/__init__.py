"""Benchmarks.

Each benchmark prints a table of its figures and, as the last line of its output, the same figures as JSON. Most
benchmarks also measure other engines or libraries (peers) in the same run.
"""
