"""Tensors in, tensors out: the arithmetic of the house. Import `emberline.kernels.ops` and nothing deeper."""
