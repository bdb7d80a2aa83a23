"""What the HTTP servers of worker, router and gateway share: routes, access, metrics, listeners and tracing."""
