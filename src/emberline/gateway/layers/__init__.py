"""The layers (middleware) that every call passes.

Each takes a handler and returns one; `stack` composes them."""
