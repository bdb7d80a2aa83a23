"""Reply formats for engine and gateway: deltas, usage, finish reasons, server-sent events, writers."""
