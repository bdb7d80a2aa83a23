"""The reply cache, which answers a request with a stored reply instead of asking the provider.

The stored reply is that of an equal request or, if the semantic cache is enabled, of a request with a similar question.
"""
