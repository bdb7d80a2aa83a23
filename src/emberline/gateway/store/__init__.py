"""Stores: what outlives a process. SQLite for one, PostgreSQL where replicas share it; both pass the same tests."""
