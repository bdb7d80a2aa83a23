"""Arithmetic on tensors for models and samplers.

Callers import `emberline.kernels.ops` and nothing deeper.
"""
