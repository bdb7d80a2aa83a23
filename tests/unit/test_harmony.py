"""Harmony, the format of gpt-oss: its parser, its grammar and its messages."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from bytelevel import EOS, byte_level
from test_output_parser import brief
from test_tools import HISTORY, ROME, STRICT, TIME
from tokenizers import AddedToken

from emberline.api.call import ToolChoice
from emberline.api.harmony_parser import HarmonyParser
from emberline.api.reasoning import HARMONY_ANALYSIS, constrain_after_reasoning, frame_answer
from emberline.api.tool_styles.harmony import HARMONY
from emberline.api.tools import build_tool_call_grammar
from emberline.core.params import GrammarSpec
from emberline.engine.grammar import GrammarCompiler

THOUGHT = "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "}"}'
F = [("call", "f"), ("args", '{"a": "}"}')]
HM = ("thought", "Hm.\n")


def parse(text: str, size: int = 0, has_tools: bool = True, was_cut_off: bool = False) -> list[tuple[str, ...]]:
    ids = count()
    parser = HarmonyParser(0, lambda: f"{next(ids):024d}", {"f"} if has_tools else set())
    chunks = [text[i : i + size] for i in range(0, len(text), size)] if size else [text]
    return brief([*(piece for chunk in chunks for piece in parser.push(chunk)), *parser.flush(was_cut_off)])


CASES = {
    "answer": (THOUGHT + FINAL + "Yes <|\n<|return|>", [HM, ("text", "Yes <|\n")]),
    "no end": (THOUGHT + FINAL + "Yes", [HM, ("text", "Yes")]),
    "call": (THOUGHT + CALL + "<|call|>", [HM, *F]),
    "call without end": (THOUGHT + CALL, [HM, *F]),
    "recipient in the role": (
        THOUGHT + ' to=functions.f<|channel|>commentary json<|message|>{"a": "}"}<|call|>',
        [HM, *F],
    ),
    "preamble": (
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}<|call|>",
        [("text", "I look."), *F],
    ),
    "two calls": (f"{CALL}<|call|><|start|>assistant{CALL}<|call|>", [*F, *F]),
    "call without arguments": (
        "<|channel|>commentary to=functions.f<|message|><|call|>",
        [("call", "f"), ("args", "{}")],
    ),
    "arguments no object": ("<|channel|>commentary to=functions.f<|message|> x y<|call|>", [("text", " x y")]),
    "text after arguments": (CALL + " \n and more", [*F, ("text", "and more")]),
    "a tool of the provider": ("<|channel|>analysis to=python<|message|>1+1<|call|>", [("thought", "1+1")]),
    "a tool that is not offered": (
        "<|channel|>commentary to=functions.g<|message|>{}<|call|>",
        [("text", "{}")],
    ),
    "analysis without end": ("<|channel|>analysis<|message|>Hm.\n" + FINAL + "Yes", [HM, ("text", "Yes")]),
    "no format": ("Hello <|message|> there", [("text", "Hello  there")]),
    "like a role": ("assistant", [("text", "assistant")]),
    "like a recipient": ("to be", [("text", "to be")]),
    "no message": (THOUGHT + "<|channel|>final", [HM, ("text", "<|channel|>final")]),
    "empty": ("", []),
}


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("case", CASES)
def test_channels(case: str, size: int) -> None:
    text, expected = CASES[case]
    assert parse(text, size) == expected


def test_call_is_text_without_tools() -> None:
    assert parse(CALL, has_tools=False) == [("text", '{"a": "}"}')]


@pytest.mark.parametrize("size", [0, 1])
def test_cut_off_header_is_dropped(size: int) -> None:
    for end in range(4, CALL.index("{") + 1):
        assert parse(CALL[:end], size, was_cut_off=True) == []
    assert parse("a", was_cut_off=True) == [("text", "a")]
    assert parse("if a <", was_cut_off=True) == [("text", "if a <")]


def test_reasoning_is_recognised_while_it_streams() -> None:
    parser = HarmonyParser(0, lambda: "", {"f"})
    parser.push("<|channel|>analysis<|mess")
    assert not parser.is_in_reasoning
    assert brief(parser.push("age|>Hm")) == [("thought", "Hm")] and parser.is_in_reasoning
    parser.push("<|end|>")
    assert not parser.is_in_reasoning


@pytest.mark.parametrize("is_special", [True, False])
def test_grammar(tmp_path: Path, is_special: bool) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<|eos|>", special=True)])
    if is_special:
        tokenizer.add_tokens([AddedToken(marker, special=True) for marker in HARMONY.markers])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = {marker: id_ for marker in HARMONY.markers if (id_ := tokenizer.token_to_id(marker)) is not None}
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", tokenizer.get_vocab_size(), [EOS])

    def accepts(grammar: GrammarSpec, text: str) -> bool:
        matcher = compiler.compile(constrain_after_reasoning(grammar, HARMONY_ANALYSIS, False, ids))
        return all(matcher.accept(token) for token in tokenizer.encode(text).ids) and EOS in matcher.allowed_tokens()

    rome, oslo = (HARMONY.format_calls([call]) for call in (ROME, ("weather", '{"city": "Oslo"}')))
    forced = build_tool_call_grammar([STRICT, TIME], ToolChoice("required"), HARMONY, True, ids)
    free = build_tool_call_grammar([STRICT, TIME], ToolChoice("auto"), HARMONY, True, ids)
    answer = frame_answer(GrammarSpec("json_object"), HARMONY_ANALYSIS, ids)
    assert forced is not None and free is not None
    assert accepts(forced, rome) and accepts(forced, THOUGHT + rome) and accepts(free, THOUGHT + rome)
    assert accepts(free, THOUGHT + THOUGHT + FINAL + "Yes") and not accepts(forced, THOUGHT + FINAL + "Yes")
    assert not accepts(forced, oslo) and not accepts(free, THOUGHT + oslo)
    assert accepts(answer, THOUGHT + FINAL + "{}") and not accepts(answer, THOUGHT + FINAL + "Yes")


def test_each_call_becomes_a_message_with_its_result() -> None:
    history = [dict(message) for message in HISTORY]
    history[2] = {**history[2], "content": "I look.", "reasoning_content": "Hm."}
    fitted = HARMONY.fit_messages(history, ())
    assert [m["role"] for m in fitted] == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [len(m["tool_calls"]) for m in fitted if "tool_calls" in m] == [1, 1]
    assert fitted[2]["thinking"] == "Hm.\nI look." and fitted[2]["content"] == "" and "thinking" not in fitted[4]
    assert [m["content"] for m in fitted if m["role"] == "tool"] == ["sunny", "noon"]
