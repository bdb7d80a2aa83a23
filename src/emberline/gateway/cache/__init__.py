"""The reply cache, which answers a request with a stored reply instead of asking the provider.

The stored reply answered an equal request or, if the semantic cache is enabled, a request with a similar question.
"""
