"""HTTP/1.1 and WebSockets: a client (`connection_pool`) and a server (`server`)."""
