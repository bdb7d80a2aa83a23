"""PenaltyCounts: how often each token occurred in one request, for penalties that the host applies.

The counts are sparse: the cost of a step depends on the number of distinct tokens in the request, not on the size of
the vocabulary. The results are bit for bit those of `ReferenceBackend.apply_penalties`."""

from __future__ import annotations

import numpy as np

from emberline.core.params import SamplingParams
from emberline.kernels.reference import MAX_TOKEN_COUNT


class PenaltyCounts:
    def __init__(self, params: SamplingParams, tokens: list[int], prompt_len: int) -> None:
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        distinct = np.unique(np.array(tokens[:prompt_len], np.int64))
        self._size = len(distinct)
        self._ids = np.zeros(max(64, 2 * self._size), np.int64)
        self._counts = np.zeros(len(self._ids), np.float32)  # occurrences in the output
        self._ids[: self._size] = distinct
        self._index = {token: i for i, token in enumerate(distinct.tolist())}
        for token in tokens[prompt_len:]:
            self.add(token)

    def add(self, token: int) -> None:
        """Count one more token of the output."""
        at = self._index.get(token)
        if at is None:
            at = self._index[token] = self._add_distinct_token(token)
        self._counts[at] = min(self._counts[at] + 1, MAX_TOKEN_COUNT)

    def apply(self, logits: np.ndarray) -> None:
        """Apply the penalties to the logits of all tokens that occurred, in place."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        values = logits[ids]
        scaled = np.where(values > 0, values / self._repetition, values * self._repetition)
        logits[ids] = scaled - (counts * self._frequency + (counts > 0) * self._presence)

    def _add_distinct_token(self, token: int) -> int:
        at = self._size
        if at == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[at] = token
        self._size += 1
        return at
