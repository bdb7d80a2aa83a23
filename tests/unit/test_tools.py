"""Tools: detection of styles, tools for templates without support, and grammars that constrain tool calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bytelevel import EOS, SPECIALS, VOCAB_SIZE, build, byte_level, tokenizer_file
from tokenizers import AddedToken

from emberline.api.call import Tool, ToolChoice
from emberline.api.reasoning import MAGISTRAL, THINK, ReasoningStyle, constrain_after_reasoning
from emberline.api.reasoning import select_reasoning_style as reasoning_for
from emberline.api.tool_styles.registry import HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, TOOL_STYLES, select_tool_style
from emberline.api.tool_styles.style import MAX_CALLS_PER_REPLY, ToolStyle
from emberline.api.tools import (
    build_tool_call_grammar,
    inject_tools,
    template_supports_tools,
    to_template_tools,
)
from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec
from emberline.engine.grammar import GrammarCompiler

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
PLACE = {
    "$defs": {"c": {"enum": ["Rome", "Bonn"]}},
    "properties": {"city": {"$ref": "#/$defs/c"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Tool("weather", "Says the weather.", PLACE)
STRICT = Tool("weather", "Says the weather.", PLACE, strict=True)
TIME = Tool("time")
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
IDS = {text: VOCAB_SIZE - len(SPECIALS) + i for i, text in enumerate(SPECIALS)}
ALL = [style for style in TOOL_STYLES.values() if style.allows_several_calls]  # test_harmony.py has the others
ROME = ("weather", '{"city": "Rome"}')
NOW = ("time", "{}")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return GrammarCompiler(tokenizer_file(tmp_path_factory.mktemp("tokenizer")), VOCAB_SIZE, [EOS])


def accepts(compiler: GrammarCompiler, grammar: GrammarSpec | None, text: str) -> bool:
    assert grammar is not None
    matcher = compiler.compile(grammar)
    return all(matcher.accept(token) for token in build().encode(text).ids) and EOS in matcher.allowed_tokens()


def special_ids(style: ToolStyle) -> dict[str, int]:
    return {marker: IDS[marker] for marker in style.markers if marker in IDS}


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (CHATML, HERMES),
        ("{% if tools %}<tool_call>{% endif %}<|im_start|>", HERMES),
        ("<|start_header_id|>{% if tools %}<|python_tag|>", LLAMA3),
        ("<|start_header_id|>system", LLAMA3),
        ("[AVAILABLE_TOOLS][TOOL_CALLS] [", MISTRAL),
        ("[TOOL_CALLS]{{ name }}[ARGS]", MISTRAL_ARGS),
        ("<|start_header_id|> <tool_call>", HERMES),
    ],
)
def test_tool_style_is_detected_by_markers(template: str, style: ToolStyle) -> None:
    assert select_tool_style(template).style is style
    assert select_tool_style(template, "mistral").style is MISTRAL
    with pytest.raises(InvalidRequest, match="hermes"):
        select_tool_style(template, "klingon")


def test_template_support_for_tools_and_reasoning() -> None:
    assert (
        not template_supports_tools(CHATML)
        and template_supports_tools("{% if tools %}")
        and not template_supports_tools("toolset")
    )
    assert reasoning_for(CHATML) is None and reasoning_for("x.split('</think>')") is THINK
    assert reasoning_for("[THINK][/THINK]") is MAGISTRAL
    assert THINK.is_opened_by("<|assistant|><think>\n") and not THINK.is_opened_by("<think>\n\n</think>\n\n")


def test_tools_for_template() -> None:
    assert to_template_tools([WEATHER, TIME]) == [
        {"type": "function", "function": {"name": "weather", "description": "Says the weather.", "parameters": PLACE}},
        {"type": "function", "function": {"name": "time", "description": "", "parameters": NOTHING}},
    ]


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_000000000000000000000abc", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
        {"id": "call_000000000000000000000def", "function": {"name": "time", "arguments": {}}},
    ]},
    {"role": "tool", "tool_call_id": "call_000000000000000000000abc", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_000000000000000000000def", "content": "noon"},
    {"role": "assistant", "content": "Sunny."},
]  # fmt: skip


def test_inject_describes_tools_in_system_message() -> None:
    before = json.dumps(HISTORY)
    injected = inject_tools(HISTORY, [WEATHER, TIME], HERMES)
    assert json.dumps(HISTORY) == before, "the caller's messages were changed"
    assert [m["role"] for m in injected] == ["system", "user", "assistant", "user", "assistant"]
    assert injected[0]["content"].startswith("Be kind.\n\n") and '"Rome", "Bonn"' in injected[0]["content"]
    assert HERMES.begin in injected[0]["content"]
    assert injected[2] == {"role": "assistant", "content": HERMES.format_calls([ROME, NOW])}
    assert injected[3]["content"].count("<tool_response>") == 2 and "answers" not in injected[3]


def test_inject_adds_system_message_only_with_tools() -> None:
    question = [{"role": "user", "content": "Hi"}]
    assert [m["role"] for m in inject_tools(question, [TIME], HERMES)] == ["system", "user"]
    assert inject_tools(question, [], HERMES) == question
    assert inject_tools(HISTORY, [], HERMES)[0] == HISTORY[0]


def test_mistral_call_ids_have_nine_characters() -> None:
    fitted = MISTRAL.fit_messages(HISTORY, ())
    ids = [call["id"] for call in fitted[2]["tool_calls"]]
    assert ids == ["000000abc", "000000def"] == [m["tool_call_id"] for m in fitted[3:5]]
    assert HERMES.fit_messages(HISTORY, ()) == HISTORY
    (short,) = MISTRAL_ARGS.fit_messages([{"role": "tool", "tool_call_id": "x-1"}], ())
    assert short["tool_call_id"] == "0000000x1"


@pytest.mark.parametrize("style", ALL, ids=lambda s: s.name)
def test_required_forces_calls(compiler: GrammarCompiler, style: ToolStyle) -> None:
    grammar = build_tool_call_grammar([WEATHER, TIME], ToolChoice("required"), style, True, special_ids(style))
    assert accepts(compiler, grammar, style.format_calls([ROME]))
    assert accepts(compiler, grammar, style.format_calls([ROME, NOW, ROME]))
    assert accepts(compiler, grammar, style.format_calls([NOW] * MAX_CALLS_PER_REPLY))
    assert not accepts(compiler, grammar, style.format_calls([NOW] * (MAX_CALLS_PER_REPLY + 1)))
    for wrong in (
        "Hello",
        "",
        style.format_calls([("other", "{}")]),
        style.format_calls([("weather", '{"city": "Oslo"}')]),
    ):
        assert not accepts(compiler, grammar, wrong)
    assert not accepts(compiler, grammar, style.format_calls([("weather", "{}")]))


@pytest.mark.parametrize("style", ALL, ids=lambda s: s.name)
def test_single_call_without_parallel(compiler: GrammarCompiler, style: ToolStyle) -> None:
    for choice, parallel in ((ToolChoice("required"), False), (ToolChoice("named", "weather"), True)):
        grammar = build_tool_call_grammar([WEATHER, TIME], choice, style, parallel, special_ids(style))
        assert accepts(compiler, grammar, style.format_calls([ROME]))
        assert not accepts(compiler, grammar, style.format_calls([ROME, ROME]))
        assert accepts(compiler, grammar, style.format_calls([NOW])) == (choice.mode == "required")


def test_complete_call_ends_the_output(compiler: GrammarCompiler) -> None:
    grammar = build_tool_call_grammar([TIME], ToolChoice("named", "time"), HERMES, True)
    assert grammar is not None
    matcher = compiler.compile(grammar)
    assert (
        all(matcher.accept(token) for token in build().encode(HERMES.format_calls([NOW])).ids) and matcher.is_complete
    )


@pytest.mark.parametrize("style", ALL, ids=lambda s: s.name)
def test_auto_enforces_strict_tools_and_allows_text(compiler: GrammarCompiler, style: ToolStyle) -> None:
    grammar = build_tool_call_grammar([STRICT, TIME], ToolChoice("auto"), style, True, special_ids(style))
    text = "It is <tool_cal or {so} [x].\n"
    lead = "" if style.markerless_starts else text
    assert accepts(compiler, grammar, text) and accepts(compiler, grammar, "")
    assert accepts(compiler, grammar, lead + style.format_calls([ROME]))
    assert accepts(compiler, grammar, lead + style.format_calls([ROME, NOW]))
    assert not accepts(compiler, grammar, lead + style.format_calls([("weather", '{"city": "Oslo"}')]))
    assert not accepts(compiler, grammar, lead + style.format_calls([("other", "{}")]))
    tagged = build_tool_call_grammar([STRICT], ToolChoice("auto"), LLAMA3, True, special_ids(LLAMA3))
    assert accepts(compiler, tagged, "Well. <|python_tag|>" + LLAMA3.format_calls([ROME]))


@pytest.mark.parametrize("style", ALL, ids=lambda s: s.name)
def test_auto_without_parallel_allows_one_call(compiler: GrammarCompiler, style: ToolStyle) -> None:
    grammar = build_tool_call_grammar([WEATHER, TIME], ToolChoice("auto"), style, False, special_ids(style))
    assert accepts(compiler, grammar, "Hello") and accepts(compiler, grammar, style.format_calls([NOW]))
    assert not accepts(compiler, grammar, style.format_calls([NOW, NOW]))


def test_no_grammar_without_constraint() -> None:
    assert build_tool_call_grammar([WEATHER], ToolChoice("none"), HERMES, True) is None
    assert build_tool_call_grammar([WEATHER], ToolChoice("auto"), HERMES, True) is None
    assert build_tool_call_grammar([], ToolChoice("auto"), HERMES, False) is None
    with pytest.raises(InvalidRequest) as caught:
        build_tool_call_grammar([WEATHER], ToolChoice("named", "nope"), HERMES, True)
    assert caught.value.param == "tool_choice"


def test_only_strict_tools_reject_unknown_keywords(compiler: GrammarCompiler) -> None:
    for strict in (False, True):
        parameters = {"type": "object", "properties": {"a": {"type": "array", "unevaluatedItems": False}}}
        tool = Tool("t", "", parameters, strict)
        grammar = build_tool_call_grammar([tool], ToolChoice("required"), HERMES, True)
        if strict:
            with pytest.raises(InvalidRequest, match="unevaluatedItems"):
                accepts(compiler, grammar, "")
        else:
            assert accepts(compiler, grammar, HERMES.format_calls([("t", '{"a": []}')]))


BOTH = [
    GrammarSpec("json_object"),
    GrammarSpec("json_schema", '{"type": "object"}'),
    GrammarSpec("regex", r"\{(/|\n)?\}"),
    GrammarSpec("choice", '["{}", "x"]'),
    GrammarSpec("grammar", 'start: "{}"'),
    GrammarSpec("grammar", 'root ::= "{}"'),
]


@pytest.mark.parametrize("grammar", BOTH, ids=lambda g: f"{g.kind}-{g.text}")
@pytest.mark.parametrize("style", [THINK, ReasoningStyle("x", "[ARGS]", "[TOOL_CALLS]")], ids=["text", "special"])
def test_constraint_applies_after_reasoning(
    compiler: GrammarCompiler, grammar: GrammarSpec, style: ReasoningStyle
) -> None:
    ids = {marker: IDS[marker] for marker in style.markers if marker in IDS}
    thought = f"Hm.\n{{ {style.end}"
    free, inside = (constrain_after_reasoning(grammar, style, opened, ids) for opened in (False, True))
    assert accepts(compiler, free, f"{style.begin}{thought}\n\n{{}}") and accepts(compiler, free, "{}")
    assert accepts(compiler, inside, thought + "{}") and not accepts(compiler, inside, "{}")
    for wrong in (f"{style.begin}{thought}y", "y", style.begin + "Hm. {}"):
        assert not accepts(compiler, free, wrong)


def test_forced_calls_allow_reasoning(compiler: GrammarCompiler) -> None:
    grammar = build_tool_call_grammar([WEATHER], ToolChoice("required"), HERMES, True)
    assert grammar is not None
    constrained = constrain_after_reasoning(grammar, THINK, True, {})
    assert accepts(compiler, constrained, "Rome, I think.</think>\n\n" + HERMES.format_calls([ROME]))
    assert not accepts(compiler, constrained, "Rome, I think.</think>\n\nRome")


@pytest.mark.parametrize("text", ["{", '{"grammars": 1}', '{"grammars": []}', '{"grammars": [1]}', '{"a":' * 9999])
def test_invalid_grammar_is_left_to_the_compiler(text: str) -> None:
    grammar = GrammarSpec("grammar", text)
    assert constrain_after_reasoning(grammar, THINK, True, {}) is grammar


@pytest.mark.parametrize("style", ALL, ids=lambda s: s.name)
@pytest.mark.parametrize("flagged", [True, False])
def test_markers_as_special_or_added_tokens(tmp_path: Path, style: ToolStyle, flagged: bool) -> None:
    """Qwen's <tool_call> is an added token, but not a special one."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(marker, special=flagged) for marker in ("<|end|>", *style.markers)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = {marker: tokenizer.token_to_id(marker) for marker in style.markers}
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", tokenizer.get_vocab_size(), [EOS])
    for choice in (ToolChoice("required"), ToolChoice("auto")):
        for calls, fits in (([ROME, NOW], True), ([ROME, ("weather", "{}")], False)):
            grammar = build_tool_call_grammar([STRICT, TIME], choice, style, True, ids)
            assert grammar is not None
            matcher = compiler.compile(grammar)
            tokens = tokenizer.encode(style.format_calls(calls)).ids
            assert all(token in matcher.allowed_tokens() and matcher.accept(token) for token in tokens) == fits


def test_markers_without_tokens_match_by_text(compiler: GrammarCompiler) -> None:
    grammar = build_tool_call_grammar([STRICT], ToolChoice("auto"), LLAMA3, True)
    assert accepts(compiler, grammar, LLAMA3.format_calls([ROME, ROME])) and accepts(compiler, grammar, "Well")
    assert not accepts(compiler, grammar, LLAMA3.format_calls([("weather", "{}")]))
