"""TokenEstimator: estimates a request's tokens from its size and from the token counts of earlier requests."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.router.request_summary import RequestSummary

NEW_REPORT_WEIGHT = 0.1  # in the moving averages


@dataclass(slots=True)
class TokenEstimator:
    """Holds moving averages of bytes per token and output length, for the requests to one model."""

    bytes_per_token: float = 4.0
    output_tokens: float = 256.0

    def estimate_prompt_tokens(self, prompt_bytes: int) -> float:
        return prompt_bytes / self.bytes_per_token

    def estimate_output_tokens(self, summary: RequestSummary) -> float:
        return self.output_tokens if summary.max_tokens is None else min(self.output_tokens, summary.max_tokens)

    def update_averages(self, summary: RequestSummary, prompt_tokens: int | None, output_tokens: int | None) -> None:
        if prompt_tokens and summary.prompt_bytes:
            # The bounds limit outliers: images have many bytes per token, templates add tokens to short prompts.
            bytes_per_token = min(max(summary.prompt_bytes / prompt_tokens, 0.25), 64.0)
            self.bytes_per_token += NEW_REPORT_WEIGHT * (bytes_per_token - self.bytes_per_token)
        if output_tokens:
            self.output_tokens += NEW_REPORT_WEIGHT * (output_tokens - self.output_tokens)
