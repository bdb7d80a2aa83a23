"""Realtime sessions: WebSockets to providers, and the usage of each session."""
