"""Parses requests of the OpenAI and Anthropic APIs, and splits output text into reply deltas. No I/O."""
