"""Argument and result structs of the sampling ops."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SamplingTensors(NamedTuple):
    """Sampling settings as tensors [S] with one element for each row of the logits."""

    temperature: Tensor  # float32
    top_k: Tensor  # int32
    top_p: Tensor  # float32
    min_p: Tensor  # float32


class LogProbs(NamedTuple):
    """Per row of the logits: the log-probabilities of one chosen token id and of the n most probable ids."""

    chosen: Tensor  # [S] float32: log-probability of the chosen id
    top_ids: Tensor  # [S, n] int64: most probable ids, in descending order
    top: Tensor  # [S, n] float32: their log-probabilities
    rank: Tensor  # [S] int64: rank of the chosen id; 1 is the most probable
