"""Kernels in CUDA C++, compiled at run time by the NVRTC that comes with torch.

`driver` compiles and launches.
"""
