"""Providers' own sockets: a session of messages both ways, and what it used."""
