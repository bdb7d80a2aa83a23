"""Kernels in CUDA C++, compiled at run time by the NVRTC that comes with torch.

The module `driver` compiles, loads and launches them.
"""
