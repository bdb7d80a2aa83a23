"""Passes providers' streams on to clients, reads their usage, and continues broken streams."""
