"""Translates requests and replies between wire formats, through one canonical form."""
