"""The management API: what a gateway has been told, and what it has done. Handlers over a Store; no HTTP."""
