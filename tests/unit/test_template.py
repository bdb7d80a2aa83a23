"""Chat templates: the features that real ones use, and malicious ones, which end soon with a typed error."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import sample_tokenizers as made

from emberline.core.errors import EmberlineError, InvalidRequest, ModelFileError, UnsupportedModel
from emberline.tokens import template as module
from emberline.tokens.render_budget import RenderBudget
from emberline.tokens.template import ChatTemplate

USER = {"role": "user", "content": "Hi there"}
TOOL = {"type": "function", "function": {"name": "weather", "description": 'Größe < "x" & y', "parameters": {}}}


def render(source: str, messages: list[dict[str, Any]] | None = None, /, **kwargs: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(messages or [USER], **kwargs)


def test_smollm2_template() -> None:
    template = ChatTemplate.load(made.smollm2())
    assert template.render([USER, {"role": "assistant", "content": "Yes"}, USER]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render([{"role": "system", "content": "Be kind."}], add_generation_prompt=False) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
    )


def test_header_style_with_dates_and_trimming() -> None:
    """The style of Llama 3: bos first, content trimmed, today's date, blocks that leave no blank lines."""
    source = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{{- "Today: " + date_string + "\n" }}
{% for message in messages %}
    {%- if message.role not in ["user", "assistant"] %}
        {{- raise_exception("no role " ~ message.role) }}
    {%- endif %}
    {{- "[" + message["role"] + "] " + message["content"] | trim + " [end]" }}
{% endfor %}
{% if add_generation_prompt %}
[assistant]
{% endif %}"""
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"}, now=lambda: datetime(2024, 7, 5))
    assert template.render([USER]) == "<s>Today: 05 Jul 2024\n\n[user] Hi there [end]\n[assistant]\n"
    text = template.render([USER], date_string="now", add_generation_prompt=False)
    assert text == "<s>Today: now\n\n[user] Hi there [end]\n"
    with pytest.raises(InvalidRequest, match="no role critic") as caught:
        template.render([{"role": "critic", "content": ""}])
    assert caught.value.param == "messages"


def test_thinking_style_with_namespace_and_slices() -> None:
    """The style of Qwen 3: a search for the last question, old reasoning removed, tools as JSON lines."""
    source = """{%- if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string %}
        {%- set ns.last = index %}{%- set ns.searching = false %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name }}({{ call.function.arguments|tojson }})
    {%- endfor %}
    {{- loop.index ~ ":" ~ content ~ ("." if loop.last else ";") }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"""
    messages = [
        USER,
        {
            "role": "assistant",
            "content": "<think>hm</think>\n\nYes",
            "tool_calls": [{"function": {"name": "f", "arguments": {"ä": [1]}}}],
        },
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "<think>oh</think>No"},
    ]
    text = render(source, messages, tools=[TOOL], enable_thinking=False)
    assert text == (
        '{"type": "function", "function": '
        '{"name": "weather", "description": "Größe < \\"x\\" & y", "parameters": {}}}\n'
        '1:Hi there;f({"ä": [1]})2:Yes;3:Sure?;4:<think>oh</think>No.<think></think>'
    )


def test_strict_style_with_macros_and_filters() -> None:
    """The style of Mistral: roles must alternate, macros, selectattr, loop controls, generation tags."""
    source = """{%- macro show(m, mark="") %}{{ mark }}{{ m.content | upper }}{% endmacro %}
{%- set users = messages | selectattr("role", "equalto", "user") | list %}
{%- for message in messages %}
    {%- if loop.index0 == 3 %}{% break %}{% endif %}
    {%- if (message.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
    {%- generation %}{{ show(message, mark="#") }}{% endgeneration %}
{%- endfor %}|{{ users | length }}|{{ users | map(attribute="content") | join(", ") }}
{#- a comment -#}
|{{ {"b": 1, "a": 2}.items() | list | first | last }}|{{ [3, 1, 2] | sort | reverse | list | tojson }}
{{- "|" + "a-b".replace("-", "+") | default("x") }}|{{ missing | default("none") }}"""
    messages = [USER, {"role": "assistant", "content": "ok"}]
    assert render(source, messages) == "#HI THERE#OK|1|Hi there|1|[3, 2, 1]|a+b|none"
    with pytest.raises(InvalidRequest, match="alternate"):
        render(source, [USER, USER])


def test_tojson_keeps_order_and_takes_an_indent() -> None:
    assert render("{{ tools[0].function | tojson(indent=2) }}", tools=[TOOL]) == json.dumps(
        TOOL["function"], ensure_ascii=False, indent=2
    )


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path)
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[TOOL]) == "tools"


def test_template_files_are_found_in_order(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": {"content": "<b>"}}))
    with pytest.raises(UnsupportedModel, match="--chat-template"):
        ChatTemplate.load(tmp_path)
    config.write_text(json.dumps({"bos_token": {"content": "<b>"}, "chat_template": "{{ bos_token }}config"}))
    assert ChatTemplate.load(tmp_path).render([USER]) == "<b>config"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file")
    assert ChatTemplate.load(tmp_path).render([USER]) == "<b>file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert ChatTemplate.load(tmp_path, tmp_path / "mine.jinja").render([USER]) == "mine"
    with pytest.raises(ModelFileError, match="cannot read"):
        ChatTemplate.load(tmp_path, tmp_path / "none.jinja")


def test_unsupported_messages_are_an_invalid_request() -> None:
    for source in (
        "{{ 'x' + messages[0].content }}",
        "{{ messages[0].nothing.more }}",
        "{{ messages[7]['content'] + '' }}",
    ):
        with pytest.raises(InvalidRequest) as caught:
            render(source, [{"role": "user", "content": None}])
        assert caught.value.param == "messages"


def test_long_conversation_is_within_the_budget() -> None:
    """The conversation has a thousand turns of two thousand characters."""
    messages = [{"role": r, "content": f"{i} " + "word " * 400} for i in range(500) for r in ("user", "assistant")]
    shown = "{% if m.role == 'user' and '</think>' not in m.content %}{{ m.content | trim }}{% endif %}"
    source = "{% for m in messages %}" + shown + "{% endfor %}"
    assert len(render(source, messages)) > 900_000


GROW = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ %s }}"
TALL = "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}"
MALICIOUS = {  # without a budget each of them would succeed or hang
    "loops": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "loop-conditions": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "text-in-loops": "{% for i in range(99999) %}" + "{% if 1 %}some text{% endif %}" * 1000 + "{% endfor %}",
    "range": "{{ range(10 ** 9) | list }}",
    "times": "{% set x = 'x' * 100000000 %}",
    "list-times": "{% set x = [1] * 50000000 %}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "numbers": GROW % ("3", "ns.x * ns.x", "1"),
    "concat": GROW % ("'ab'", "ns.x ~ ns.x", "1"),
    "plus": GROW % ("'ab'", "ns.x + ns.x", "1"),
    "list-plus": GROW % ("[1]", "ns.x + ns.x", "1"),
    "shared-print": GROW % ("[1]", "[ns.x, ns.x]", "ns.x"),
    "shared-json": GROW % ("{}", "{'a': ns.x, 'b': ns.x}", "ns.x | tojson"),
    "shared-string": GROW % ("[1]", "[ns.x, ns.x]", "ns.x | string | length"),
    "shared-compare": GROW % ("[[1], [1]]", "[[ns.x[0], ns.x[0]], [ns.x[1], ns.x[1]]]", "ns.x[0] == ns.x[1]"),
    "shared-test": GROW % ("[[1], [1]]", "[[ns.x[0], ns.x[0]], [ns.x[1], ns.x[1]]]", "ns.x[0] is eq(ns.x[1])"),
    "set-blocks": "{% macro m(x, n) %}{% if n %}{% set y %}{{ x }}{{ x }}{% endset %}{{ m(y, n - 1) }}{% endif %}"
    "{% endmacro %}{{ m('ab', 60) }}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
    "call-blocks": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 40
    + "x"
    + "{% endcall %}" * 40,
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive-loop": "{% for a in [[1]] recursive %}{{ loop(a) }}{% endfor %}",
    "own-block": "{% block a %}{{ self.a() }}{% endblock %}",
    "center": "{{ 'x'.center(1000000000) }}",
    "center-filter": "{{ 'x' | center(1000000000) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format-filter": "{{ '%1000000000d' | format(1) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "replace": "{% set x = ('a' * 10000).replace('a', 'b' * 10000) %}",
    "replace-filter": "{% set x = ('a' * 10000) | replace('a', 'b' * 10000) %}",
    "join": "{% set x = ('b' * 10000).join('a' * 10000) %}",
    "join-filter": "{% set x = ('a' * 10000) | join('b' * 10000) %}",
    "indent": "{% set x = ('\n' * 10000) | indent(10000, true, true) %}",
    "json-indent": "{{ [1] | tojson(indent=1000000000) }}",
    "searching": TALL + "{% if 'b' in s %}{% endif %}{% endfor %}",
    "counting": TALL + "{% set x = s.count('ab') %}{% endfor %}",
    "slicing": TALL + "{% set x = s[::-1] %}{% endfor %}",
    "selecting": TALL + "{% set x = [s] | select('in', s) | list %}{% endfor %}",
    "to-bytes": "{{ (5).to_bytes(1000000000, 'big') }}",
    "classes": "{{ ''.__class__.__mro__ }}",
    "classes-of-messages": "{{ messages.__class__.__base__ }}",
    "globals": "{{ raise_exception.__globals__['x'] }}",
    "attribute-filter": "{{ '' | attr('__class__') }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "lipsum": "{{ lipsum(100000) }}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nesting": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "long-sum": "{{ 1" + " + 1" * 20000 + " }}",
    "nots": "{{ " + "not " * 20000 + "1 }}",
    "long": "x" * 300_000,
    "syntax": "{% for %}",
    "dates": "{{ strftime_now('%Y' * 40000000) }}",
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_malicious_templates_end_soon(name: str) -> None:
    with pytest.raises(EmberlineError):
        render(MALICIOUS[name])


def test_extra_variables_are_those_that_the_template_reads() -> None:
    source = """{{ bos_token }}{% set ns = namespace(n=0) %}{% if not early is defined %}{% set early = 1 %}{% endif %}
{% set kept = kept | default(true) %}{% set hidden = 1 %}{{ hidden }}{{ messages[0].attribute }}{{ tools }}
{% macro m(x) %}{{ x }}{{ inside }}{% endmacro %}{% for message in messages %}{{ m(message) }}{{ looped }}{% endfor %}
{{ raise_exception("no") if strftime_now("%Y") == asked }}"""
    template = ChatTemplate({"default": source, "tool_use": "{{ with_tools }}"}, {})
    assert template.extra_variables(with_tools=False) == {"early", "kept", "inside", "looped", "asked"}
    assert template.extra_variables(with_tools=True) == {"with_tools"}


def test_hidden_attributes_are_empty() -> None:
    assert render("[{{ messages.__class__ }}{{ ''['__class__'] }}]") == "[]"
    assert "class" not in render("{{ [''] | map(attribute='__class__') | list }}")


def test_budget_is_per_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate({"default": "{% for i in range(10000) %}x{% endfor %}"}, {})
    for _ in range(30):
        assert len(template.render([USER])) == 10000
    monkeypatch.setattr(module, "RenderBudget", lambda: RenderBudget(100_000))
    with pytest.raises(ModelFileError, match="too much work"):
        template.render([USER])
