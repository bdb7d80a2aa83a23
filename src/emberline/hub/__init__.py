"""Finds, downloads, converts and opens model checkpoints, without torch."""
