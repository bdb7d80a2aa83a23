"""Prompts: a call's messages or texts become the tokens the engine continues."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from emberline.api import reasoning, tools
from emberline.api.call import ChatCall, CompletionCall, GenerationCall, Tool
from emberline.api.reasoning import ReasoningStyle
from emberline.api.toolstyle import ToolStyle
from emberline.api.wishes import ignored_wishes
from emberline.core.errors import ContextLengthExceeded, InvalidRequest
from emberline.core.params import SamplingParams
from emberline.server.worker.protocol import CHARACTERS_PER_TOKEN
from emberline.tokens.template import ChatTemplate
from emberline.tokens.tokenizer import Tokenizer

LONG_TEXT = 20_000  # characters: longer texts are tokenized beside the event loop
MARK = "\ue0f1\ue0f2"  # private use: no template writes it
MANY_MESSAGES = 100  # more are rendered beside it, too
MANY_TOOLS = 20  # so are more tools


class Prompts:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, style: ToolStyle, max_context: int) -> None:
        self.tokenizer = tokenizer
        self.max_context = max_context
        self._template = template
        self._style = style
        sources = list(template.sources.values()) if template is not None else []
        self._knows_tools = any(tools.knows_tools(source) for source in sources)
        self._reasoning = reasoning.style_for("".join(sources))
        self.closing = _closing(tokenizer, self._reasoning)  # ends the reasoning; empty: nothing does

    async def rendered(self, call: ChatCall, created: int | None = None) -> str:
        """As `render`; what takes long runs in a thread, whose Python code lets the event loop have its turns."""
        if len(call.messages) > self.max_context:
            raise ContextLengthExceeded(
                f"{len(call.messages)} messages do not fit the context of {self.max_context} tokens", param="messages"
            )
        long = (
            len(call.messages) > MANY_MESSAGES
            or len(call.tools) > MANY_TOOLS
            or any(len(message.get("content") or "") > LONG_TEXT for message in call.messages)
        )
        return await asyncio.to_thread(self.render, call, created) if long else self.render(call, created)

    def render(self, call: ChatCall, created: int | None = None) -> str:
        """The conversation as the model was trained to see it. `created`: what the time is, in seconds since 1970; a
        reply that goes on elsewhere, or after midnight, has the prompt that it began with. None: now."""
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template", hint="use /v1/completions, or serve with --chat-template"
            )
        self.ignored(call)
        messages = tools.fit_ids(call.messages, self._style)
        if not self._knows_tools:
            messages = tools.inject(messages, _shown(call), self._style)
        listed = self._listed(call)
        mark = _mark(messages) if call.continue_last else ""
        if mark:
            messages = [*messages[:-1], _marked(messages[-1], mark)]
        dated = {} if created is None else {"strftime_now": datetime.fromtimestamp(created).strftime}
        text = self._template.render(
            messages, listed, call.generation_prompt and not call.continue_last, **call.template_args, **dated
        )
        return _unfinished(text, mark) if mark else text

    def ignored(self, call: ChatCall) -> list[str]:
        """The fields that this model's template has no use for."""
        if self._template is None:
            return []
        known = self._template.arguments(self._listed(call) is not None)
        found = ignored_wishes(call.wishes, known, self._reasoning is not None)
        if call.thinking_budget is not None and not self.closing and "thinking" not in found:
            found.append("thinking.budget_tokens")  # no marker would end this model's reasoning
        return found

    def _listed(self, call: ChatCall) -> list[dict[str, Any]] | None:
        """The tools, as a template that knows them takes them."""
        shown = _shown(call)
        return tools.shown(shown) if shown and self._knows_tools else None

    async def encode(self, text: str | list[int], *, add_special: bool, param: str) -> list[int]:
        if isinstance(text, list):
            return text
        if len(text) > self.max_context * CHARACTERS_PER_TOKEN:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.max_context} tokens, and a text of {len(text)} "
                "characters does not fit it",
                param=param,
                hint="shorten it",
            )
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.token_text(i) for i in ids]

    def truncated(self, ids: list[int], call: GenerationCall) -> list[int]:
        """The last or first tokens of a prompt, as many as its request keeps."""
        if call.truncate is None:
            return ids
        kept = self.max_context - 1 if call.truncate < 0 else call.truncate
        return ids[:kept] if call.keep_first or not kept else ids[-kept:]

    def forbidding(self, call: ChatCall | CompletionCall) -> SamplingParams:
        """The call's params, with its bad words as tokens: each as it begins a text, and as it follows a space."""
        if any(token >= self.tokenizer.vocab_size for token in call.params.allowed_token_ids):
            param = "allowed_token_ids"
            raise InvalidRequest(f"{param} must be in [0, {self.tokenizer.vocab_size})", param=param)
        words: dict[tuple[int, ...], None] = {}
        for word in call.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                if ids := self.tokenizer.encode(text, add_special=False):
                    words[tuple(ids)] = None
        return replace(call.params, bad_words=tuple(words)) if words else call.params

    def check_length(self, ids: Sequence[int], param: str) -> None:
        """Before the engine says the same, so that the error names the field of the protocol that was spoken."""
        if len(ids) >= self.max_context:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.max_context} tokens, and the prompt has {len(ids)}, "
                "which leaves none for the answer",
                param=param,
                hint="shorten it",
            )
        if not ids:
            raise InvalidRequest("the prompt has no tokens", param=param)


def _shown(call: ChatCall) -> Sequence[Tool]:
    return call.tools if call.tool_choice.mode != "none" else ()


def _closing(tokenizer: Tokenizer, style: ReasoningStyle | None) -> list[int]:
    ids = tokenizer.encode(style.end, add_special=False) if style is not None else []
    spelled = b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8", "replace")
    # SentencePiece puts a space before the text.
    return ids if style is not None and spelled.removeprefix(" ") == style.end else []


def _mark(messages: list[dict[str, Any]]) -> str:
    """What nobody says."""
    said, mark = list(_texts(messages)), MARK
    while any(mark in text for text in said):
        mark += mark
    return mark


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (key, *_texts(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _marked(last: dict[str, Any], mark: str) -> dict[str, Any]:
    """Where its content ends: that may be trimmed, or occur in what closes it too."""
    content = (last.get("content") or "").rstrip()
    return {**last, "content": content + mark} if content else last


def _unfinished(text: str, mark: str) -> str:
    """The rendered text up to the end of the last message's content: what the template adds to close it is cut off."""
    at = text.rfind(mark)
    if at < 0:
        raise InvalidRequest(
            "the last message has no text that this model's template shows, so it cannot be continued", param="messages"
        )
    return text[:at]
