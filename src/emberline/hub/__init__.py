"""Finds, downloads, converts and opens model checkpoints. Torch-free."""
