"""TokenEstimator: estimates the tokens of a request from its bytes and earlier requests' usage."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.router.ask import Ask

WEIGHT = 0.1  # in the moving averages


@dataclass(slots=True)
class Estimate:
    """The moving averages of one model."""

    bytes_per_token: float = 4.0
    output_tokens: float = 256.0

    def prompt(self, size: int) -> float:
        return size / self.bytes_per_token

    def output(self, ask: Ask) -> float:
        return self.output_tokens if ask.most_tokens is None else min(self.output_tokens, ask.most_tokens)

    def correct(self, ask: Ask, prompt_tokens: int | None, output_tokens: int | None) -> None:
        if prompt_tokens and ask.size:
            # The bounds limit outliers: images have many bytes per token, templates add tokens to short prompts.
            bytes_per_token = min(max(ask.size / prompt_tokens, 0.25), 64.0)
            self.bytes_per_token += WEIGHT * (bytes_per_token - self.bytes_per_token)
        if output_tokens:
            self.output_tokens += WEIGHT * (output_tokens - self.output_tokens)
