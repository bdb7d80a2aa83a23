"""The router: which worker gets a request. Policy is pure; only `upstream` talks to anyone."""
