"""Limits on requests, tokens and money: reserved before a call, settled after it, given back when its holder died."""
