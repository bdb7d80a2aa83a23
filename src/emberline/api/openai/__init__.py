"""OpenAI's protocols: chat completions, text completions, embeddings and models."""
