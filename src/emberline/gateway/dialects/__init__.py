"""What clients and providers speak, translated through one inner form."""
