"""The router's HTTP server, which relays clients' requests to workers and retries them when workers fail."""
