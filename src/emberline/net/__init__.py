"""HTTP/1.1 and WebSockets, both ways: `pool` asks others, `server` is asked."""
