"""Guardrails: pattern rules and judge models that flag, redact or block texts of requests and replies."""
