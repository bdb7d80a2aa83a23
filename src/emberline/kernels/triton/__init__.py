"""Triton kernels for any shape and float type. They also run in Triton's interpreter, without a GPU."""
