"""The wire format of Gemini's generateContent API."""
