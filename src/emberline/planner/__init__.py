"""The planner finds how many GPUs serve a model, in which topology, by memory plan, step costs and simulation."""
