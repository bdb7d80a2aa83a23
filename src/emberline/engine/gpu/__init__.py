"""The engine's runner on a GPU, with steps captured as CUDA graphs and results read asynchronously."""
