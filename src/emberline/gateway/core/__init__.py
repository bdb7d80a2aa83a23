"""The gateway's central types, which all its other packages import: request, reply, settings, identity, usage, cost."""
