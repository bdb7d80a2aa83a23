"""The wire formats of clients and providers, and their translation through one canonical form."""
