"""What a client asked for, whichever protocol it spoke: the nouns between the wire formats and the generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from emberline.api.wishes import Wish
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
class Caller:
    """Who asks and how urgent it is: the part every kind of call has."""

    model: str  # empty: the one that is served
    priority: Priority = Priority.INTERACTIVE
    salt: str = ""
    user: str | None = None  # goes to the request log
    request_id: str | None = None  # the reply's id, without its protocol's prefix; None: a new one


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """What chats and text completions have alike."""

    bad_words: Sequence[str] = ()  # texts that are never written
    truncate: int | None = None  # tokens of the prompt that are kept, its last ones; -1: what the context holds
    keep_first: bool = False  # `truncate` keeps the first tokens instead
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # logprobs show each token as "token_id:N"
    unset: frozenset[str] = frozenset()  # sampling settings that are left to the checkpoint's defaults
    ignored: Sequence[str] = ()  # fields that have no effect
    stream: bool = False
    running_usage: bool = False  # push a Progress before each output's pieces


@dataclass(frozen=True, slots=True)
class ChatCall(GenerationCall):
    caller: Caller
    messages: Sequence[dict[str, Any]]  # as chat templates take them: content is text, tool arguments are objects
    params: SamplingParams
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    template_args: dict[str, Any] = field(default_factory=dict)  # e.g. enable_thinking
    wishes: Sequence[Wish] = ()  # the fields that template_args come from
    thinking_budget: int | None = None  # tokens of reasoning, after which it is closed; with n = 1
    continue_last: bool = False  # the last message is the assistant's and is to be continued
    generation_prompt: bool = True  # end the prompt with the opening of the assistant's turn
    add_special_tokens: bool = False  # tokenize the rendered prompt with them too; templates write their own


@dataclass(frozen=True, slots=True)
class CompletionCall(GenerationCall):
    caller: Caller
    prompts: Sequence[str | list[int]]  # each gives params.n choices
    params: SamplingParams
    echo: bool = False
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    caller: Caller
    inputs: Sequence[str | list[int]]
    dimensions: int | None = None
    encoding: Literal["float", "base64"] = "float"
