"""The GPU runner: request state on the device, steps captured as CUDA graphs, results read asynchronously."""
