"""Data types that all packages share: requests, plans, events, settings, errors.

Standard library only."""
