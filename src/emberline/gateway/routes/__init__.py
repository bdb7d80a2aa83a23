"""Decides where a request is sent.

A request can name a dynamic route (a graph that selects a model), a pool, or a list of steps.
"""
