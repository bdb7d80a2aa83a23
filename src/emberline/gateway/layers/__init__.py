"""The layers (middleware) that every request passes.

A layer is a function that takes a handler and returns a handler. `stack_layers` combines the layers.
"""
