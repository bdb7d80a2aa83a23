"""The gateway's central types: request, reply, settings, identity, usage and cost.

All other packages of the gateway import them.
"""
