"""The gateway: one URL in front of many LLM providers, with caching, limits, costs, keys, logs and fallbacks.

It imports neither torch nor the engine.
"""
