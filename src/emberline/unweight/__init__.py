"""Lossless compression of model weights (docs/unweight-format.md), without torch."""
