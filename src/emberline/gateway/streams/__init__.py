"""Streamed replies: split into events, metered, passed on, and continued elsewhere if they break."""
