"""The models: a decoder whose layers depend on its config, and a BERT embedder.

`config` and the file readers do not import torch.
"""
