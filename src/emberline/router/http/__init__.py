"""The router's HTTP server: relays clients' requests to workers, and their replies back, across
worker failures."""
