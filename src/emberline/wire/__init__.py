"""Replies on the wire, for engine and gateway: deltas, usage, finish reasons, server-sent events, and writers."""
