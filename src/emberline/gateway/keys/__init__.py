"""Who may ask, and with whose key a provider is asked."""
