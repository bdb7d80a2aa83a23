"""Limits on requests, tokens and money.

They are reserved before a call, settled after it, and released when the holder of a reservation dies."""
