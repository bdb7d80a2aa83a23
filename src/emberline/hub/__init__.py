"""Models on disk: finding, downloading, converting and opening checkpoints. Torch-free."""
