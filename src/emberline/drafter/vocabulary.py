"""DraftVocabulary: the tokens that a drafter can draft, in ascending order of their ids in the target model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from emberline.drafter.sequences import Answer


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    ids: np.ndarray  # int64, ascending: the target's id of each draft id
    vocab: int  # tokens of the target model

    @staticmethod
    def choose(answers: Sequence[Answer], vocab: int, size: int, end_tokens: Iterable[int]) -> DraftVocabulary:
        """Return the `size` most frequent tokens of the answers; the end tokens are always among them.

        If the answers have fewer distinct tokens, unused tokens with the lowest ids follow."""
        counts = np.zeros(vocab, np.int64)
        for each in answers:
            counts += np.bincount(each.tokens[each.prompt_length :], minlength=vocab)
        counts[list(end_tokens)] = np.iinfo(np.int64).max
        order = np.argsort(-counts, kind="stable")
        return DraftVocabulary(np.sort(order[:size]).astype(np.int64), vocab)

    @property
    def d2t(self) -> np.ndarray:
        """int64 [size]: what is added to a draft id to get the target's id."""
        offsets: np.ndarray = self.ids - np.arange(len(self.ids))
        return offsets

    @property
    def t2d(self) -> np.ndarray:
        """bool [vocab]: whether each token of the target is in the draft vocabulary."""
        contained = np.zeros(self.vocab, np.bool_)
        contained[self.ids] = True
        return contained

    def covered_share(self, answers: Sequence[Answer]) -> float:
        """Return which share of the answers' tokens is in the draft vocabulary."""
        tokens = np.concatenate([each.tokens[each.prompt_length :] for each in answers])
        return float(self.t2d[tokens].mean())
