"""Where a call is sent: dynamic routes (graphs that select a model), pools of providers, and lists of steps."""
