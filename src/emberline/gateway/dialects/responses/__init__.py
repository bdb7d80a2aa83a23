"""The wire format of OpenAI's Responses API."""
