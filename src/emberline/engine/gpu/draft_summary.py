"""DraftModelSummary: what every rank must know of the draft model, which only the leader has. It needs no torch."""

from __future__ import annotations

import msgspec


class DraftModelSummary(msgspec.Struct, frozen=True):
    # Tokens of a request that the attention of the target model and of the draft model can compute together.
    max_row_queries: int
    exists: bool = False  # whether there is a draft model
    reads_output: bool = False  # whether it reads the output of the target model's last layer
