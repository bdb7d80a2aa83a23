"""The formats in which model families write tool calls, one module for each; `registry` selects one for a model."""
