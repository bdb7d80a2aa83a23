"""The management API: settings, keys, routes, logs and costs of gateways. Handlers over the store, without HTTP."""
