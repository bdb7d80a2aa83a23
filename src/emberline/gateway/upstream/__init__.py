"""HTTP requests to providers over pooled connections, with protection against requests to private addresses."""
