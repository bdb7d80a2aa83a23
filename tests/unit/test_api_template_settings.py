"""Fields for the chat template: each has an effect on the prompt or is rejected by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from bytelevel import build, byte_level
from tokenizers import Tokenizer as Inner
from tokenizers import models

from emberline.api import tokenize
from emberline.api.anthropic import request as anthropic
from emberline.api.call import ChatCall
from emberline.api.openai import chat
from emberline.api.responses import request as responses
from emberline.api.tool_styles.registry import HERMES
from emberline.core.errors import InvalidRequest
from emberline.tokens.template import ChatTemplate
from emberline.tokens.tokenizer import Tokenizer
from emberline.worker.prompt_builder import PromptBuilder

TEXT = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEMPLATES = {
    "plain": TEXT,
    "reasons": TEXT + "{% if add_generation_prompt %}<think>{% endif %}{{ '</think>' if false }}",
    "switch": TEXT + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}",
    "effort": TEXT + "{% set effort = reasoning_effort | default('some') %}{{ effort }}{{ '</think>' if false }}",
    "mute": TEXT + "{{ enable_thinking }}",  # the template can turn reasoning on but has no end marker
    "own": "{% set x = 1 %}" + TEXT + "{{ x }}{{ style }}",
}
Parse = Callable[[dict[str, Any]], ChatCall]


def prompts(template: str, inner: Inner | None = None) -> PromptBuilder:
    chat_template = ChatTemplate({"default": TEMPLATES.get(template, template)}, {})
    return PromptBuilder(Tokenizer(inner or build()), chat_template, HERMES, 1000)


def of_chat(fields: dict[str, Any]) -> ChatCall:
    return chat.parse(json.dumps({"model": "m", "messages": [{"role": "user", "content": "q"}], **fields}).encode())


def of_responses(fields: dict[str, Any]) -> ChatCall:
    return responses.parse(json.dumps({"model": "m", "input": "q", **fields}).encode())


def of_tokenize(fields: dict[str, Any]) -> ChatCall:
    call = tokenize.parse(json.dumps({"messages": [{"role": "user", "content": "q"}], **fields}).encode()).prompt
    assert isinstance(call, ChatCall)
    return call


def of_messages(fields: dict[str, Any]) -> ChatCall:
    body = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "q"}], **fields}
    return anthropic.parse(json.dumps(body).encode())


def of_count(fields: dict[str, Any]) -> ChatCall:
    body = {"model": "m", "messages": [{"role": "user", "content": "q"}], **fields}
    return anthropic.parse_count_tokens(json.dumps(body).encode())


ON, OFF = {"thinking": {"type": "enabled", "budget_tokens": 9}}, {"thinking": {"type": "disabled"}}
ADAPTIVE, EFFORT = {"thinking": {"type": "adaptive"}}, {"output_config": {"effort": "low"}}
BUDGET = "thinking.budget_tokens"


def kwargs(**given: Any) -> dict[str, Any]:
    return {"chat_template_kwargs": given}


# a request, and for each template the field without effect: reasoning hints are ignored, others rejected
CASES: list[tuple[Parse, dict[str, Any], dict[str, str]]] = [
    (of_messages, ON, {"plain": "thinking", "own": "thinking", "mute": BUDGET}),
    (of_count, ON, {"plain": "thinking", "own": "thinking", "mute": BUDGET}),
    (of_messages, ADAPTIVE, {"plain": "thinking", "own": "thinking"}),
    (of_messages, OFF, {"reasons": "thinking", "effort": "thinking"}),
    (of_count, OFF, {"reasons": "thinking", "effort": "thinking"}),
    (of_messages, EFFORT, dict.fromkeys(("plain", "reasons", "switch", "mute", "own"), "output_config.effort")),
    (of_messages, {}, {}),
    (of_chat, {"reasoning_effort": "none"}, {"reasons": "reasoning_effort"}),
    (of_chat, {"reasoning_effort": "low"}, dict.fromkeys(("plain", "reasons", "own"), "reasoning_effort")),
    (of_responses, {"reasoning": {"effort": "none"}}, {"reasons": "reasoning.effort"}),
    (
        of_responses,
        {"reasoning": {"effort": "high"}},
        dict.fromkeys(("plain", "reasons", "own"), "reasoning.effort"),
    ),
    (of_responses, {"reasoning": {"summary": "auto"}}, {}),
    *(
        (parse, builder, dict.fromkeys(refusing, f"chat_template_kwargs.{name}"))
        for parse in (of_chat, of_responses, of_tokenize)
        for name, builder, refusing in (
            ("style", kwargs(style=1), ("plain", "reasons", "switch", "effort", "mute")),
            (
                "x",
                kwargs(x=1),
                tuple(TEMPLATES),
            ),  # the template has a budget of its own, which the field would not change
            ("enable_thinking", kwargs(enable_thinking=False), ("reasons", "effort")),
            ("enable_thinking", kwargs(enable_thinking=True), ("plain", "own")),
            ("reasoning_effort", kwargs(reasoning_effort="none"), ("reasons", "switch")),
        )
    ),
]


@pytest.mark.parametrize(("parse", "fields", "without_effect"), CASES)
def test_field_has_an_effect_or_is_rejected_by_name(
    parse: Parse, fields: dict[str, Any], without_effect: dict[str, str]
) -> None:
    for name in TEMPLATES:
        call = parse(fields)
        if name not in without_effect:
            assert prompts(name).render(call), name
            continue
        if not without_effect[name].endswith((".style", ".x")):
            assert prompts(name).find_ignored_fields(call) == [without_effect[name]] and prompts(name).render(call), (
                name
            )
            continue
        with pytest.raises(InvalidRequest) as caught:
            prompts(name).find_ignored_fields(call)
        assert caught.value.param == without_effect[name], name
        assert without_effect[name] in caught.value.message and caught.value.hint


def test_hint_lists_variables_of_the_template() -> None:
    with pytest.raises(InvalidRequest) as caught:
        prompts("{{ b }}{{ bos_token }}{{ a }}" + TEXT).render(of_chat(kwargs(c=1)))
    assert caught.value.hint is not None and caught.value.hint.endswith("a, b")


def test_effort_that_contradicts_kwargs_is_rejected() -> None:
    with pytest.raises(InvalidRequest) as caught:
        of_chat({"reasoning_effort": "low", **kwargs(reasoning_effort="high", enable_thinking=False)})
    assert caught.value.param == "reasoning_effort"
    both = of_chat({"reasoning_effort": "low", **kwargs(enable_thinking=False)})
    assert both.template_args == {"reasoning_effort": "low", "enable_thinking": False}
    # This template reads enable_thinking only, for which kwargs give the other value.
    assert prompts("switch").find_ignored_fields(both) == ["reasoning_effort"]


def test_template_sees_the_creation_date() -> None:
    dated = prompts("{{ strftime_now('%Y') }}" + TEXT)
    assert dated.render(of_chat({}), 1_000_000_000) == "2001q" and dated.render(of_chat({})) > "2025q"


def test_thinking_budget_needs_an_end_marker() -> None:
    call = of_messages(ON)
    assert prompts("switch").reasoning_end_tokens == byte_level().encode("</think>").ids
    assert prompts("switch").render(call) == "q"
    words = Inner(models.WordLevel({"q": 0, "<unk>": 1}, unk_token="<unk>"))
    assert prompts("switch", words).find_ignored_fields(call) == [BUDGET]
    assert prompts("switch").find_ignored_fields(call) == []


def test_tool_template_is_checked_for_variables() -> None:
    template = ChatTemplate({"default": TEXT, "tool_use": TEXT + "{{ tools }}{{ enable_thinking }}"}, {})
    builder = PromptBuilder(Tokenizer(build()), template, HERMES, 1000)
    tool = {"type": "function", "function": {"name": "f"}}
    assert builder.render(of_chat({"tools": [tool], **kwargs(enable_thinking=True)})).endswith("True")
    assert builder.find_ignored_fields(of_chat(kwargs(enable_thinking=True))) == [
        "chat_template_kwargs.enable_thinking"
    ]
