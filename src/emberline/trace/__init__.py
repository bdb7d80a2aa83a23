"""Trace: one request as OpenTelemetry tells it, over all the processes that had a part in it."""
