"""Chooses how many GPUs serve a model, in which topology: memory plan, step costs, search, then simulation."""
