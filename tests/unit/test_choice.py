"""Choice converts outputs to deltas that follow the sampling parameters, and an echo has its tokens' offsets."""

from __future__ import annotations

from bytelevel import build

from emberline.api.call import Tool
from emberline.api.marker_parser import MarkerParser
from emberline.api.tool_styles.registry import HERMES
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.plan import TokenLogprob
from emberline.core.request import FinishReason
from emberline.tokens.tokenizer import Tokenizer
from emberline.wire.deltas import Delta, Finish, TextDelta
from emberline.worker.choice import Choice


def deltas_of(params: SamplingParams, text: str) -> list[Delta]:
    tokenizer = Tokenizer(build())
    choice = Choice(0, tokenizer, params, None, visible_special_tokens=frozenset(), continues_prompt=False)
    ids = [i for letter in text for i in tokenizer.encode(letter, add_special=False)]
    return [delta for i in ids for delta in choice.process_output(Output("a", 0, [i]))]


def test_stop_strings_apply_after_min_tokens() -> None:
    deltas = deltas_of(SamplingParams(stop=("b",), min_tokens=3), "abcabc")
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == "abca"
    assert deltas[-1] == Finish("stop", "b")


def test_echo_token_offsets() -> None:
    """Several tokens of one character have the same offset."""
    tokenizer = Tokenizer(build())
    text = "a \U0001f600 b \xfc c"
    ids = tokenizer.encode(text, add_special=False)
    choice = Choice(0, tokenizer, SamplingParams(), None, visible_special_tokens=frozenset(), continues_prompt=True)
    echoed = choice.echo_prompt(ids, [TokenLogprob(-1.0, 1)] * (len(ids) - 1))
    assert echoed.text == text
    for info in echoed.tokens:
        if "\ufffd" not in info.text:
            assert text.startswith(info.text, info.offset), info
    assert echoed.tokens[-1].offset == len(text) - 1


def test_cut_off_call_head_is_dropped() -> None:
    tokenizer = Tokenizer(build())
    for finish, text in ((FinishReason.LENGTH, "Well. "), (FinishReason.STOP, 'Well. <tool_call>{"name": "f')):
        splitter = MarkerParser(0, lambda: "x" * 24, HERMES, tools=[Tool("f")])
        choice = Choice(
            0, tokenizer, SamplingParams(), splitter, visible_special_tokens=frozenset(), continues_prompt=False
        )
        ids = tokenizer.encode('Well. <tool_call>{"name": "f', add_special=False)
        deltas = [delta for i in ids for delta in choice.process_output(Output("a", 0, [i]))]
        deltas += choice.process_output(Output("a", 0, [], finish=finish))
        assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == text
