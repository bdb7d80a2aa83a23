"""What is written down of every call, and for how long."""
