"""Text to tokens and back, chat templates, block identity. Torch-free."""
