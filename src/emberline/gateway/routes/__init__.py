"""Where a call goes: dynamic routes (graphs that say which model answers), pools of places, lists of steps."""
