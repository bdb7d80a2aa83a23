"""Training of drafters: small models that draft tokens for speculative decoding."""
