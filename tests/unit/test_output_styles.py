"""The choice of tool and reasoning styles, and the form in which templates take earlier tool calls."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from bytelevel import build
from test_tools import HISTORY

from emberline.api.call import ChatCall, CommonFields, Tool
from emberline.api.reasoning import REASONING_STYLES, select_reasoning_style
from emberline.api.tool_styles.granite import GRANITE
from emberline.api.tool_styles.kimi import KIMI
from emberline.api.tool_styles.phi4 import PHI4
from emberline.api.tool_styles.registry import TOOL_STYLES, select_tool_style
from emberline.core.config import ServerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams
from emberline.tokens.template import ChatTemplate
from emberline.tokens.tokenizer import Tokenizer
from emberline.worker.call_form import CallForm, find_call_form
from emberline.worker.output_styles import select_output_styles
from emberline.worker.prompt_builder import PromptBuilder

# Parts of the published chat templates by which a format is recognised, with the reasoning style.
TEMPLATES = {
    "qwen3-coder": ("<tool_call>\\n<function=example>\\n<parameter=example_1>", None),
    "seed": ("<seed:tool_call>\\n<function=f>\\n<parameter=a>", "seed"),
    "glm-4.5": ("</think><tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "think"),
    "glm-4.7": ("</think><tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>", "think"),
    "deepseek-v3": ("'</think>' '<｜tool▁call▁begin｜>' + '\\n```json'", "think"),
    "deepseek-v3.1": ("'</think>' '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'", "think"),
    "deepseek-v3.2": ("dsml_token = '｜DSML｜' <' + dsml_token + 'function_calls> </think>", "think"),
    "deepseek-v4": ("dsml_token = '｜DSML｜' <' + dsml_token + 'tool_calls> </think>", "think"),
    "minimax": ('<minimax:tool_call> <invoke name="', None),
    "lfm2": ("<|tool_call_start|>", None),
    "kimi": ("<|tool_calls_section_begin|><|tool_call_begin|>", None),
    "cohere": ("<|START_THINKING|><|END_THINKING|><|START_ACTION|>[", "cohere"),
    "command-r": ("Write 'Action:' followed by a json-formatted list of actions that you want", None),
    "granite": ("respond only with <|tool_call|>; <think></think> and <response></response>", "think-response"),
    "phi4-mini": ("'<|tool|>' + message['tools'] + '<|/tool|>'", None),
    "functools": ('formatted as functools[{"name": [function name]', None),
    "pythonic": ("<|header_start|>[func_name1(param1=value1, param2=value2), func_name2(...)]", None),
    "gemma4": ("'<|tool_call>call:' + name '<|channel>thought'", "gemma"),
    "functiongemma": ("<start_function_call>call:", None),
    "harmony": ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
    "mistral-args": ("[TOOL_CALLS]{{ name }}[ARGS][THINK][/THINK]", "mistral"),
    "hermes": ("<tool_call>", None),
    "llama3": ("<|header_start|>", None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_styles_are_recognised_by_the_template(name: str) -> None:
    template, reasoning = TEMPLATES[name]
    selected = select_tool_style(template)
    assert (selected.style.name, selected.is_certain) == (name, True)
    found = select_reasoning_style(template)
    assert (found.name if found else None) == reasoning


def test_model_type_decides_if_the_template_shows_nothing() -> None:
    assert select_tool_style("{{ messages }}", model_type="gemma3_text").style.name == "gemma3"
    assert select_tool_style("<tool_call>", model_type="gemma3_text").style.name == "hermes"
    for style in TOOL_STYLES.values():
        for model_type in style.model_types:
            assert select_tool_style("", model_type=model_type).style is style, "two styles claim this model type"
    assert not select_tool_style("", model_type="unknown").is_certain


def test_unknown_format_is_logged_once_tools_are_supported(caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(models={"m": "m"})
    with caplog.at_level(logging.WARNING, "emberline.server"):
        assert select_output_styles(config, "m", "{{ messages }}", "").tool_style.name == "hermes"
        assert not caplog.records
        select_output_styles(config, "m", "{% if tools %}<|call_tool|>{% endif %}", "")
    (record,) = caplog.records
    assert "--tool-style" in record.getMessage() and "qwen3-coder" in record.getMessage()


def test_styles_of_the_settings() -> None:
    config = ServerConfig(models={"m": "m"}, tool_style="glm-4.5", reasoning_style="kimi-vl")
    styles = select_output_styles(config, "m", "<tool_call></think>", "")
    assert styles.tool_style.name == "glm-4.5" and styles.reasoning is REASONING_STYLES["kimi-vl"]
    off = ServerConfig(models={"m": "m"}, reasoning_style="none")
    assert select_output_styles(off, "m", "<tool_call></think>", "").reasoning is None


@pytest.mark.parametrize(
    ("template", "settings", "expected"),
    [
        ("", {}, ("harmony", "harmony")),
        ("{{ messages }}", {}, ("harmony", "harmony")),
        ("<tool_call>", {}, ("hermes", None)),
        ("</think>", {}, ("hermes", "think")),
        ("<tool_call></think>", {}, ("hermes", "think")),
        ("", {"reasoning_style": "none"}, ("hermes", None)),
        ("", {"reasoning_style": "harmony"}, ("harmony", "harmony")),
        ("", {"tool_style": "harmony"}, ("harmony", "harmony")),
        ("", {"tool_style": "hermes"}, ("hermes", None)),
    ],
)
def test_gpt_oss_starts_with_any_template(
    template: str, settings: dict[str, str], expected: tuple[str, str | None]
) -> None:
    config = ServerConfig(models={"m": "m"}, **settings)  # type: ignore[arg-type]
    styles = select_output_styles(config, "m", template, "gpt_oss")
    assert (styles.tool_style.name, styles.reasoning.name if styles.reasoning else None) == expected


def test_one_setting_selects_both_styles_of_gpt_oss() -> None:
    for settings in ({"tool_style": "harmony"}, {"reasoning_style": "harmony"}):
        config = ServerConfig(models={"m": "m"}, **settings)  # type: ignore[arg-type]
        styles = select_output_styles(config, "m", "{{ messages }}", "")
        assert styles.tool_style.uses_channels and styles.reasoning is REASONING_STYLES["harmony"]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"tool_style": "klingon"}, "unknown tool style 'klingon'"),
        ({"reasoning_style": "klingon"}, "unknown reasoning style 'klingon'"),
        ({"tool_style": "harmony"}, "cannot be combined with the reasoning style think"),
        ({"reasoning_style": "harmony"}, "the tool style hermes cannot be combined"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(settings: dict[str, str], match: str) -> None:
    config = ServerConfig(models={"m": "m"}, **settings)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=match) as caught:
        select_output_styles(config, "m", "<tool_call></think>", "")
    assert caught.value.param in ("tool_style", "reasoning_style")


def test_styles_apply_to_one_model() -> None:
    with pytest.raises(InvalidRequest, match="reasoning_style applies to one model"):
        ServerConfig(models={"a": "a", "b": "b"}, reasoning_style="think")


CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}%s{% endfor %}{{ m.content }};{% endfor %}{{ tools }}"
FORMS = {
    "items": ("{{ c.function.name }}{% for k, v in c.function.arguments.items() %}{{ k, v }}{% endfor %}", CallForm()),
    "tojson": ("{{ c.function.name }}{{ c.function.arguments | tojson }}", CallForm()),
    "text": ("{{ c.function.name + c.function.arguments }}", CallForm(arguments_are_text=True)),
    "printed": ("{{ c.function.name }}{{ c.function.arguments }}", CallForm(arguments_are_text=True)),
    "null": (
        "{% if m.content is none %}{{ c.function.name + c.function.arguments }}{% endif %}",
        CallForm(arguments_are_text=True, content_is_null=True),
    ),
    "no calls": ("", None),
    "an error": ("{{ raise_exception('no calls') }}", CallForm()),
}


@pytest.mark.parametrize("case", FORMS)
def test_form_of_earlier_calls(case: str) -> None:
    source, form = FORMS[case]
    template = ChatTemplate({"default": CALLS.replace("%s", source)}, {})
    assert find_call_form(template.render) == form


def render(source: str, messages: list[dict[str, Any]], style: Any, tools: tuple[Tool, ...] = ()) -> str:
    builder = PromptBuilder(Tokenizer(build()), ChatTemplate({"default": source}, {}), style, 1000)
    return builder.render(ChatCall(CommonFields("m"), messages, SamplingParams(), tools=tools))


def test_earlier_calls_are_rendered_in_the_form_of_the_template() -> None:
    hermes = TOOL_STYLES["hermes"]
    assert 'weather{"city": "Rome"}time{}' in render(CALLS.replace("%s", FORMS["text"][0]), HISTORY, hermes)
    before = [{**message, "content": "I look."} if message.get("tool_calls") else message for message in HISTORY]
    text = render(CALLS.replace("%s", FORMS["null"][0]), before, hermes)
    assert text.index("I look.") < text.index('weather{"city": "Rome"}')
    assert '[{"name": "weather", "arguments": {"city": "Rome"}}, ' in render(CALLS.replace("%s", ""), HISTORY, GRANITE)


def test_kimi_ids_survive_and_others_are_converted() -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}"
    source = "{% for m in messages %}" + calls + "{{ m.tool_call_id }}{% endfor %}{{ tools }}"
    ids = re.findall(r"functions\.\w+:\d", render(source, HISTORY, KIMI))
    assert ids == ["functions.weather:0", "functions.time:1"] * 2
    kept = json.loads(json.dumps(HISTORY).replace("call_000000000000000000000abc", "functions.weather:7"))
    fitted = KIMI.fit_messages(kept, ())
    assert [call["id"] for call in fitted[2]["tool_calls"]] == ["functions.weather:7", "functions.time:1"]
    assert [m["tool_call_id"] for m in fitted[3:5]] == ["functions.weather:7", "functions.time:1"]


def test_phi_template_gets_tools_in_the_system_message() -> None:
    message = "<|{{ m.role }}|>{{ m.content }}{% if m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}"
    source = "{% for m in messages %}" + message + "{% endfor %}"
    text = render(source, [{"role": "user", "content": "Hi"}], PHI4, (Tool("time"),))
    assert text.startswith('<|system|><|tool|>[{"name": "time"') and text.endswith("<|user|>Hi")


def test_document_lists_all_styles() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tool-formats.md").read_text()
    for style in (*TOOL_STYLES.values(), *REASONING_STYLES.values()):
        assert f"| `{style.name}` | {style.families}" in page
