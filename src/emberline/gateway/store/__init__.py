"""Persistent stores of the gateway: SQLite for one process, PostgreSQL for several replicas."""
