"""The nouns that every room shares. Standard library only."""
