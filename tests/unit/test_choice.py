"""One completion's outputs as deltas: what its params say of its text holds."""

from __future__ import annotations

from bytelevel import build

from emberline.api.deltas import Delta, Finish, TextDelta
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.server.worker.choice import Choice
from emberline.tokens.tokenizer import Tokenizer


def told(params: SamplingParams, text: str) -> list[Delta]:
    tokenizer = Tokenizer(build())
    choice = Choice(0, tokenizer, params, None, kept=frozenset(), continuing=False)
    ids = [i for letter in text for i in tokenizer.encode(letter, add_special=False)]
    return [delta for i in ids for delta in choice.take(Output("a", 0, [i]))]


def test_the_least_of_tokens_comes_before_stop_strings() -> None:
    deltas = told(SamplingParams(stop=("b",), min_tokens=3), "abcabc")
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == "abca"
    assert deltas[-1] == Finish(0, "stop", "b")
