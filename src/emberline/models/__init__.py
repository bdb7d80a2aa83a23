"""The models: one decoder assembled by config, and an embedder.

`config` and the file readers do not import torch.
"""
