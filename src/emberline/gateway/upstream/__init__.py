"""HTTP requests to providers over pooled connections; custom ones only at public addresses."""
