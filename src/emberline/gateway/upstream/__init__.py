"""Requests to providers over connections that are kept, and replies as they come; only to where one may ask."""
