"""Weights in fewer bytes, with not one bit changed: docs/unweight-format.md says how. No torch."""
