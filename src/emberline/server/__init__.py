"""ASGI composition: the protocols of api over the engine. Torch-free: the engine is another process."""
