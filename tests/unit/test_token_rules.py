"""TokenRules: allowed_token_ids and bad_words as masks of single steps."""

from __future__ import annotations

import numpy as np

from emberline.core.params import SamplingParams
from emberline.engine.token_rules import TokenRules, make_masker

VOCAB = 70


class Even:
    """A grammar that allows even tokens."""

    is_complete, error = False, None

    def fill_mask(self, mask: np.ndarray) -> None:
        mask[:] = 0x55555555

    def accept(self, token: int) -> bool:
        return token % 2 == 0


def may_follow(rules: TokenRules) -> set[int]:
    mask = np.zeros(-(-VOCAB // 32), np.int32)
    rules.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
    return set(np.flatnonzero(bits).tolist())


def test_only_allowed_tokens_are_sampled() -> None:
    params = SamplingParams(allowed_token_ids=(0, 31, 32, 69, 1000))
    assert may_follow(TokenRules(params, None)) == {0, 31, 32, 69}
    assert may_follow(TokenRules(params, Even())) == {0, 32}


def test_bad_word_is_never_completed() -> None:
    rules = TokenRules(SamplingParams(bad_words=((31,), (5, 6, 7), (6, 64))), None)
    everything = set(range(VOCAB))
    assert may_follow(rules) == everything - {31}
    for token, barred in ((6, {31, 64}), (5, {31}), (6, {31, 7, 64}), (1, {31})):
        assert rules.accept(token)
        assert may_follow(rules) == everything - barred, token


def test_rules_that_allow_no_token_end_the_request() -> None:
    rules = TokenRules(SamplingParams(allowed_token_ids=(3,), bad_words=((3,),)), None)
    assert may_follow(rules) and rules.error and not rules.is_complete


def test_without_rules_the_grammar_is_used_alone() -> None:
    grammar = Even()
    assert make_masker(SamplingParams(), grammar) is grammar
    assert make_masker(SamplingParams(), None) is None
