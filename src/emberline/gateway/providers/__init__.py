"""The providers, one small file each: the URL, credentials and deviations from the wire format of each API."""
