"""A router's HTTP: requests to workers, replies back, whoever falls over meanwhile."""
