"""The gateway: one URL in front of many LLM providers.

It adds caching, limits, costs, keys, logs and fallbacks. It imports neither torch nor the engine.
"""
