"""Models run as Workers AI runs them: by name, at once or queued, over any provider."""
