"""The models: one decoder assembled by config, and an embedder.

`config` and the file readers are torch-free.
"""
