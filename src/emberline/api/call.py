"""Parsed API requests ("calls"), in one form for all protocols. The worker serves these calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from emberline.api.fields import NONE_IGNORED, IgnoredFields
from emberline.api.template_settings import TemplateSetting
from emberline.core.params import SamplingParams
from emberline.core.request import Priority


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)  # a JSON schema
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None  # with "named"


@dataclass(frozen=True, slots=True)
class CommonFields:
    """The fields that chat, text completion and embedding calls share."""

    model: str  # empty: the server's only model
    priority: Priority = Priority.INTERACTIVE
    cache_salt: str = ""
    tenant: str = ""  # of the API key; set by the server
    user: str | None = None  # written to the request log
    request_id: str | None = None  # the reply's id without the protocol's prefix; None: the server generates one


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """The fields that chat calls and text completion calls share."""

    bad_words: Sequence[str] = ()  # texts that the output must not contain
    truncate_prompt_tokens: int | None = None  # number of last prompt tokens to keep; -1: as the context holds
    keeps_first_tokens: bool = False  # truncation keeps the first tokens instead of the last
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # logprobs write each token as "token_id:N"
    unset_params: frozenset[str] = frozenset()  # sampling parameters that take the checkpoint's defaults
    ignored: IgnoredFields = NONE_IGNORED
    stream: bool = False
    running_usage: bool = False  # a UsageUpdate precedes the deltas of each engine output


@dataclass(frozen=True, slots=True)
class ChatCall(GenerationCall):
    common: CommonFields
    messages: Sequence[dict[str, Any]]  # in the form chat templates take: content is text, tool arguments are objects
    params: SamplingParams
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    template_args: dict[str, Any] = field(default_factory=dict)  # e.g. enable_thinking
    template_settings: Sequence[TemplateSetting] = ()  # the request fields from which template_args were made
    thinking_budget: int | None = None  # tokens of reasoning after which the server closes it; requires n = 1
    continues_last_message: bool = False  # the output continues the last message, which is the assistant's
    adds_generation_prompt: bool = True  # the prompt ends with the template's opening of an assistant message
    add_special_tokens: bool = False  # the tokenizer adds special tokens to those that the template writes
    prediction: str | None = None  # text that the client expects as the answer; it changes only the speed


@dataclass(frozen=True, slots=True)
class CompletionCall(GenerationCall):
    common: CommonFields
    prompts: Sequence[str | list[int]]  # params.n choices are generated for each
    params: SamplingParams
    echo: bool = False
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    common: CommonFields
    inputs: Sequence[str]
    dimensions: int | None = None
    encoding: Literal["float", "base64"] = "float"
    truncates: bool = False  # inputs that are longer than the model's context are cut instead of refused
    ignored: IgnoredFields = NONE_IGNORED
