"""The gateway's central nouns, below all its other packages: request, reply, settings, identity, usage, cost."""
