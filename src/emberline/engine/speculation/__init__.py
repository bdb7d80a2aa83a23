"""Speculative decoding: guess the next tokens of a request, and compute several of them in one step."""
