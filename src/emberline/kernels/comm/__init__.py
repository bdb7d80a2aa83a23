"""Collectives: how the ranks of an engine on several devices exchange tensors."""
