"""Parses the requests of each HTTP API (OpenAI, Anthropic) and splits generated text into reply deltas. No I/O."""
