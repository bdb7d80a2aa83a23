"""What is measured, how, and beside whom. Every bench prints a table and ends in one JSON line."""
