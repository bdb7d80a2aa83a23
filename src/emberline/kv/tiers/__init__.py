"""Tiers: where blocks of keys and values lie when the main cache has no room for them, behind one lookup."""
