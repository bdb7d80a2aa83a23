"""The engine's computing half on a GPU: rows kept on the device, steps captured as graphs, results fetched late."""
