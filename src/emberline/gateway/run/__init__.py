"""The endpoint /ai/run of Cloudflare's Workers AI, for the models of any provider."""
