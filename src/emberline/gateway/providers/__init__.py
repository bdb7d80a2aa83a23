"""The providers, one module each: URL, credentials, and deviations from the wire format."""
