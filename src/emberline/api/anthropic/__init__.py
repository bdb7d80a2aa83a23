"""Anthropic's API: POST /v1/messages and its token counts."""
