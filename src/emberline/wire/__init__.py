"""The wire protocols' replies, which engine and gateway share: deltas, usage, finish reasons, server-sent events."""
