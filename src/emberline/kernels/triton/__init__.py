"""Kernels in Triton: any shape and float type; they also run in Triton's interpreter, without a GPU."""
