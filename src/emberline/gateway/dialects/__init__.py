"""Translates requests and replies between the wire formats of clients and providers, through one canonical form."""
