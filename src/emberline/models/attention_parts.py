"""AttentionParts: kinds of attention that DecoderParts had no words for when the first KV blocks were stored.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """The defaults are Llama's."""

    chunked_windows: bool = False  # whether a layer's window is the chunk of that size that a query is in
    has_sinks: bool = False  # whether each query head has a learned score that joins the softmax and has no value


LLAMA_ATTENTION = AttentionParts()
