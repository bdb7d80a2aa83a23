"""How workers and routers find each other: registrations, heartbeats, membership, supervision."""
