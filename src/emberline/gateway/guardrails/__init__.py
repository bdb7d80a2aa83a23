"""Guardrails: what may not go in or out."""
