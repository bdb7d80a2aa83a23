"""A simulated cluster on a virtual clock: production scheduler and router, simulated GPUs."""
