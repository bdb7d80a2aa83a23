"""Measurements on an NVIDIA GPU: kernels alone, and the engine.

`python -m emberline.bench.gpu` runs them.
"""
