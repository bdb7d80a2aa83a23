"""Tracing: OpenTelemetry spans of a request across all processes that handle it."""
