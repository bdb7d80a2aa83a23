"""The engine: scheduler, runners and the engine process. Only runners, samplers and boot need torch."""
