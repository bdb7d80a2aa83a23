"""Limits on requests, tokens and money.

An amount is reserved before a request is sent to the provider. After the request it is settled: the reservation is
replaced by the amount that was used. If the process dies, its reservations expire.
"""
