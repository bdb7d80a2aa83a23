"""Data types that all packages share: requests, step plans, events, settings and errors.

This package imports only the standard library."""
