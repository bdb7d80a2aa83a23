"""Replies kept for those who ask the same again: exactly the same, or (if wanted) something that means the same."""
