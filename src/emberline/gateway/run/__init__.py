"""The endpoint /ai/run of Cloudflare's Workers AI, for the models of any provider: at once, or queued in batches."""
