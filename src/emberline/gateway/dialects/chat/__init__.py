"""The wire format of OpenAI's Chat Completions API."""
