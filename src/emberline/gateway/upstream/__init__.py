"""HTTP requests to providers over pooled connections.

Custom providers are reached only at public addresses.
"""
