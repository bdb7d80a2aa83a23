"""Workers and how they find each other: cards, heartbeats, incarnations, and processes on one machine."""
