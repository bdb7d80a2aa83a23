"""The engines that `emberline bench cpu` compares with ours.

Each runs in a child process with its own Python environment and uses `child_protocol`.
"""
