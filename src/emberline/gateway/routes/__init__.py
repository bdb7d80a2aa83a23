"""Dynamic routes: graphs that say which model answers a call."""
