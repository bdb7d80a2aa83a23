"""The providers, one file each: URL, credentials, and deviations from the wire format."""
