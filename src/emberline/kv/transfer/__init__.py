"""Moving blocks of keys and values from one cache into another."""
