"""The management API: settings, keys, routes, logs and costs of gateways. It is independent of HTTP."""
