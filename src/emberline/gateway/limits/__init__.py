"""Limits on requests, tokens and money: reserved before a call, settled after it, released when the holder dies."""
