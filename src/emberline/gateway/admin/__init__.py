"""The management API: reads and changes settings, keys, routes, logs and costs of gateways.

It has no HTTP code.
"""
