"""The router: which worker gets a request. Policy is pure; only `upstream` and its `connection` talk to anyone."""
