"""Streamed replies: split into events, metered, passed on, and continued at another provider if they break."""
