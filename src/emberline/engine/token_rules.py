"""TokenRules: a mask for allowed_token_ids and bad_words, alone or together with a grammar's mask."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from emberline.core.params import SamplingParams

if TYPE_CHECKING:  # needs llguidance, which a machine without structured output may lack
    from emberline.engine.grammar import GrammarMatcher

Mask = np.ndarray  # int32: one bit for each id of the vocabulary


class TokenMasker(Protocol):
    """Computes which tokens may be sampled next. GrammarMatcher and TokenRules implement this protocol."""

    def fill_mask(self, mask: Mask) -> None: ...

    def accept(self, token: int) -> bool: ...

    def fork(self) -> TokenMasker:
        """Return a copy that can accept other tokens."""
        ...

    def forced_tokens(self) -> list[int]:
        """Return the tokens that probably come next because the rules leave no other text."""
        ...

    @property
    def is_complete(self) -> bool: ...

    @property
    def error(self) -> str | None: ...


class TokenRules:
    def __init__(self, params: SamplingParams, grammar: TokenMasker | None) -> None:
        self._grammar = grammar
        self._allowed_ids = params.allowed_token_ids
        self._allowed: Mask | None = None  # made with the first mask, which shows the vocabulary's size
        self._bad_words = params.bad_words
        self._max_bad_word_len = max(map(len, self._bad_words), default=1)
        self._recent_tokens: list[int] = []  # the newest output tokens: one less than the longest bad word has
        self._allows_no_token = False

    def fill_mask(self, mask: Mask) -> None:
        if self._grammar is not None:
            self._grammar.fill_mask(mask)
        else:
            mask[:] = -1
        if self._allowed_ids:
            if self._allowed is None:
                bits = np.zeros(32 * len(mask), bool)
                bits[[token for token in self._allowed_ids if token < len(bits)]] = True
                self._allowed = np.packbits(bits, bitorder="little").view(np.int32)
            mask &= self._allowed
        for word in self._bad_words:
            if word[-1] >= 32 * len(mask):
                continue
            if len(word) == 1 or tuple(self._recent_tokens[1 - len(word) :]) == word[:-1]:
                mask.view(np.uint32)[word[-1] // 32] &= np.uint32(0xFFFFFFFF ^ (1 << word[-1] % 32))
        self._allows_no_token = not mask.any()
        if self._allows_no_token:
            mask[:] = -1  # the request ends with `error`; a row of -inf alone has no most probable token

    def accept(self, token: int) -> bool:
        if self._max_bad_word_len > 1:
            self._recent_tokens = [*self._recent_tokens, token][1 - self._max_bad_word_len :]
        return self._grammar is None or self._grammar.accept(token)

    def fork(self) -> TokenRules:
        copied = copy(self)
        copied._grammar = None if self._grammar is None else self._grammar.fork()
        return copied

    def forced_tokens(self) -> list[int]:
        return [] if self._grammar is None else self._grammar.forced_tokens()

    @property
    def is_complete(self) -> bool:
        return self._grammar is not None and self._grammar.is_complete

    @property
    def error(self) -> str | None:
        if self._allows_no_token:
            return "bad_words and allowed_token_ids leave no token to sample"
        return self._grammar.error if self._grammar is not None else None


def make_masker(params: SamplingParams, grammar: TokenMasker | None) -> TokenMasker | None:
    """Return the object that masks the tokens of a request; None if all tokens are allowed."""
    has_rules = params.bad_words or params.allowed_token_ids
    return TokenRules(params, grammar) if has_rules else grammar


def fill_masks(maskers: Sequence[TokenMasker], masks: Mask) -> None:
    """Write each masker's mask to its row of `masks`, in parallel if all maskers are GrammarMatchers."""
    if any(isinstance(masker, TokenRules) for masker in maskers):
        for masker, mask in zip(maskers, masks, strict=True):
            masker.fill_mask(mask)
        return
    from emberline.engine import grammar

    grammar.fill_masks(cast("Sequence[GrammarMatcher]", maskers), masks)
