"""Guardrails: rules and judges that flag, redact or block parts of requests and replies."""
