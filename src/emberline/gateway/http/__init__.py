"""The gateway's server process: HTTP, WebSockets, metrics and start-up."""
