"""Workloads of the simulator: random arrivals, conversations of agents, and replays of recorded traffic."""
