"""The HTTP servers of worker, router and gateway, as ASGI applications. No torch here."""
