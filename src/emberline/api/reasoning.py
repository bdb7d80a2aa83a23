"""Reasoning: the text between two markers that some models write before their answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emberline.api.lark import build_literal_term, build_regex_term, to_llguidance_grammars
from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    name: str
    begin: str
    end: str  # text that ends the reasoning; the server writes it when the request's reasoning budget is spent
    families: str = ""  # the models that write reasoning like this
    other_begin_markers: tuple[str, ...] = ()
    other_end_markers: tuple[str, ...] = ()
    dropped_markers: tuple[str, ...] = ()  # texts around the answer that carry no meaning of their own
    answer_frame: tuple[str, str] = ("", "")  # texts before and after the answer, if it is not tool calls
    extra_markers: tuple[str, ...] = ()  # further texts that the detokenizer must keep if they are special tokens
    template_signs: tuple[tuple[str, ...], ...] = ()  # a chat template with all texts of one group uses this style
    uses_channels: bool = False  # the output consists of messages with a header: see HarmonyParser

    @property
    def begin_markers(self) -> tuple[str, ...]:
        return (self.begin, *self.other_begin_markers)

    @property
    def end_markers(self) -> tuple[str, ...]:
        return (self.end, *self.other_end_markers)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the detokenizer must keep if they are special tokens."""
        return (*self.begin_markers, *self.end_markers, *self.dropped_markers, *self.extra_markers)

    def is_used_by(self, template: str) -> bool:
        return any(all(text in template for text in texts) for texts in self.template_signs)

    def is_opened_by(self, prompt: str) -> bool:
        """Return whether the prompt ends with the opening marker: then the output begins with reasoning."""
        return prompt.rstrip().endswith(self.begin_markers)


THINK = ReasoningStyle(
    "think",
    "<think>",
    "</think>",
    "DeepSeek, Qwen 3, Qwen3-Next, Qwen 3.5, GLM, Kimi K2, Kimi K2.5, SmolLM 3",
    template_signs=(("</think>",),),
)
THINK_RESPONSE = ReasoningStyle(
    "think-response",
    "<think>",
    "</think>",
    "Granite 3.3",
    dropped_markers=("<response>", "</response>"),
    template_signs=(("<think></think>", "<response></response>"),),
)
SEED_THINK = ReasoningStyle(
    "seed", "<seed:think>", "</seed:think>", "Seed-OSS", template_signs=(("<seed:tool_call>",), ("<seed:think>",))
)
MAGISTRAL = ReasoningStyle("mistral", "[THINK]", "[/THINK]", "Magistral, Ministral 3", template_signs=(("[/THINK]",),))
KIMI_VL = ReasoningStyle("kimi-vl", "◁think▷", "◁/think▷", "Kimi-VL", template_signs=(("◁/think▷",), ("◁think▷",)))
COHERE_THINKING = ReasoningStyle(
    "cohere",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "Command R7B, Command A",
    dropped_markers=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    answer_frame=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    template_signs=(("<|START_THINKING|>",), ("<|START_RESPONSE|>",)),
)
GRANITE_THOUGHT = ReasoningStyle(
    "granite",
    "Here is my thought process:",
    "Here is my response:",
    "Granite 3.2",
    other_begin_markers=("Here's my thought process:",),
    other_end_markers=("Here's my response:",),
    template_signs=(("Here is my thought process:",), ("Here's my thought process:",)),
)
GEMMA_THOUGHT = ReasoningStyle(
    "gemma",
    "<|channel>thought",
    "<channel|>",
    "Gemma 4",
    extra_markers=("<|channel>",),
    template_signs=(("<|channel>thought",),),
)
HARMONY_ANALYSIS = ReasoningStyle(
    "harmony",
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    "gpt-oss",
    answer_frame=("<|channel|>final<|message|>", ""),
    extra_markers=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    template_signs=(("<|channel|>analysis",), ("<|start|>assistant", "<|channel|>")),
    uses_channels=True,
)

# Ordered: of two styles whose signs a template contains, the first one is used.
REASONING_STYLES: dict[str, ReasoningStyle] = {
    style.name: style
    for style in (
        HARMONY_ANALYSIS,
        GEMMA_THOUGHT,
        COHERE_THINKING,
        KIMI_VL,
        SEED_THINK,
        MAGISTRAL,
        GRANITE_THOUGHT,
        THINK_RESPONSE,
        THINK,
    )
}


def select_reasoning_style(template: str, name: str = "auto") -> ReasoningStyle | None:
    """Return the style called `name`, or None for "none". Raises InvalidRequest for an unknown name.

    With "auto", return the style whose markers occur in the chat template, or None if no style's markers do.
    """
    if name == "none":
        return None
    if name == "auto":
        return next((style for style in REASONING_STYLES.values() if style.is_used_by(template)), None)
    if name not in REASONING_STYLES:
        raise InvalidRequest(
            f"unknown reasoning style {name!r}",
            param="reasoning_style",
            hint=f"--reasoning-style takes auto, none, {', '.join(REASONING_STYLES)}",
        )
    return REASONING_STYLES[name]


def frame_answer(grammar: GrammarSpec, style: ReasoningStyle, special_tokens: Mapping[str, int]) -> GrammarSpec:
    """Return a grammar for the answer together with the texts that this style writes before and after it."""
    if style.answer_frame == ("", ""):
        return grammar
    try:
        first, *rest = to_llguidance_grammars(grammar)
    except (ValueError, TypeError, KeyError, RecursionError):
        return grammar
    before, after = (build_literal_term(text, special_tokens) if text else "" for text in style.answer_frame)
    top = {"lark_grammar": f"start: {before} @answer {after}"}
    return GrammarSpec("grammar", json.dumps({"grammars": [top, {**first, "name": "answer"}, *rest]}))


def constrain_after_reasoning(
    grammar: GrammarSpec, style: ReasoningStyle, is_reasoning_open: bool, special_tokens: Mapping[str, int]
) -> GrammarSpec:
    """Return a grammar that allows free reasoning first and then applies `grammar` to the answer.

    `special_tokens` maps markers that are special tokens to their ids. A grammar that cannot be parsed is returned
    unchanged, so that the grammar compiler reports the error.
    """
    try:
        first, *rest = to_llguidance_grammars(grammar)
    except (ValueError, TypeError, KeyError, RecursionError):
        return grammar
    if any(style.end.startswith(token) for token in special_tokens):
        thought = f"TEXT {build_literal_term(style.end, special_tokens)}"
        lead = (
            f"lead: {thought}"
            if is_reasoning_open
            else f"lead: ({build_literal_term(style.begin, special_tokens)} {thought})?"
        )
    else:
        inside = f"(.|\\n)*{re.escape(style.end)}"
        thought = f"thought[lazy]: {build_regex_term(inside if is_reasoning_open else re.escape(style.begin) + inside)}"
        lead = f"lead: thought{'' if is_reasoning_open else '?'}\n{thought}"
    return _prefix_grammar(f"lead GAP @body\n{lead}\nTEXT: /(.|\\n)*/", first, rest)


def constrain_answer(grammar: GrammarSpec) -> GrammarSpec:
    """Return a grammar for output after the reasoning: white space, then what `grammar` matches."""
    try:
        first, *rest = to_llguidance_grammars(grammar)
    except (ValueError, TypeError, KeyError, RecursionError):
        return grammar
    return _prefix_grammar("GAP @body", first, rest)


def _prefix_grammar(
    prefix_rule: str, main_grammar: dict[str, Any], other_grammars: list[dict[str, Any]]
) -> GrammarSpec:
    top = {"lark_grammar": f"start: {prefix_rule}\nGAP: /[ \\n]{{0,4}}/\n"}
    return GrammarSpec("grammar", json.dumps({"grammars": [top, {**main_grammar, "name": "body"}, *other_grammars]}))
