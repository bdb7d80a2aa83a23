"""Ollama's protocol: /api/chat, /api/generate, embeddings, and the lists and descriptions of models."""
