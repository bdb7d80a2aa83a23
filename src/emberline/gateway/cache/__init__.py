"""The reply cache: replies for calls that are equal, or (if enabled) that ask a similar question."""
