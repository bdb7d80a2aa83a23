"""Benchmarks on an NVIDIA GPU: single kernels, and the whole engine.

Run them with `python -m emberline.bench.gpu`.
"""
