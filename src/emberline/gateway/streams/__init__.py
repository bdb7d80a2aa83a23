"""A reply on its way, in pieces: cut into events, metered, passed on, continued elsewhere if it breaks."""
