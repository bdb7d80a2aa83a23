"""PromptBuilder: converts messages and texts to the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Any, ParamSpec, Protocol, TypeVar

from emberline.api import tools
from emberline.api.call import ChatCall, CompletionCall, GenerationCall, Tool
from emberline.api.reasoning import ReasoningStyle, select_reasoning_style
from emberline.api.template_settings import find_ignored_settings
from emberline.api.tool_styles.style import ToolStyle
from emberline.core.errors import ContextLengthExceeded, InvalidRequest
from emberline.core.fair_threads import FairThreads, FairWorkers
from emberline.core.params import SamplingParams
from emberline.tokens.template import ChatTemplate
from emberline.tokens.template_process import TemplateProcess
from emberline.tokens.tokenizer import Tokenizer
from emberline.worker.call_form import PROBE_TOOL, CallForm, find_call_form
from emberline.worker.protocols import MAX_CHARS_PER_TOKEN
from emberline.worker.system_messages import move_system_messages_first

P = ParamSpec("P")
T = TypeVar("T")

LONG_TEXT_CHARS = 8_000  # longer texts are tokenized in a thread; some of this length take 7 ms
END_MARKER = "\ue0f1\ue0f2"  # private-use characters, which no template writes
PROMPT_THREADS = 4


class TemplateRenderer(Protocol):
    """ChatTemplate, or TemplateProcess in its place."""

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str: ...


class MissingTemplate:
    """The renderer of a model that has no chat template."""

    def render(self, *_: Any, **__: Any) -> str:
        raise InvalidRequest(
            "the model has no chat template",
            hint="use /v1/completions, or start the server with --chat-template FILE",
        )


class PromptBuilder:
    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        tool_style: ToolStyle,
        max_context: int,
        reasoning_style: str = "auto",
        template_processes: Sequence[TemplateProcess] = (),
    ) -> None:
        """`template_processes` render the template for `render_off_loop`, in place of this process."""
        self.tokenizer = tokenizer
        self.max_context = max_context
        self._threads = FairThreads("long prompts", PROMPT_THREADS)
        self._template_processes = tuple(template_processes)
        self._renderers: Sequence[TemplateRenderer]
        self._renderers = self._template_processes or (template if template is not None else MissingTemplate(),)
        self._render_workers = FairWorkers("chat prompts", self._renderers)
        self._template = template
        self._style = tool_style
        sources = list(template.sources.values()) if template is not None else []
        self._supports_tools = any(tools.template_supports_tools(source) for source in sources)
        self._reasoning = select_reasoning_style("".join(sources), reasoning_style)
        # Empty if no marker ends the reasoning.
        self.reasoning_end_tokens = _reasoning_end_tokens(tokenizer, self._reasoning)

    def close(self) -> None:
        self._threads.close()
        self._render_workers.close()
        for process in self._template_processes:
            process.close()

    @property
    def template_text(self) -> str:
        """The source of the chat template; "" if the model has none."""
        return next(iter(self._template.sources.values()), "") if self._template is not None else ""

    @property
    def can_reason(self) -> bool:
        return self._reasoning is not None

    async def render_off_loop(self, call: ChatCall, created: int | None = None) -> str:
        """Render the prompt in a thread, with one of the renderers, and return its text.

        Raises ContextLengthExceeded if there are more messages than the model's context has tokens.
        """
        if len(call.messages) > self.max_context:
            raise ContextLengthExceeded(
                f"messages has {len(call.messages)} items, but the model's context has only {self.max_context} tokens",
                param="messages",
                hint="send fewer messages",
            )
        return await self._render_workers.run(
            call.common.tenant, lambda renderer: self._render_with(renderer, call, created)
        )

    def render(self, call: ChatCall, created: int | None = None) -> str:
        """Return the prompt's text, rendered by the calling thread."""
        return self._render_with(self._renderers[0], call, created)

    def _render_with(self, renderer: TemplateRenderer, call: ChatCall, created: int | None) -> str:
        """Return the prompt's text: the messages and tools, rendered with the model's chat template.

        The template sees `created`, a Unix time, as the current time; None stands for now. So a reply that continues
        at a different worker has the same prompt. Raises InvalidRequest if the model has no chat template, or if its
        template rejects the request.
        """
        self.find_ignored_fields(call)
        tool_list = self._tools_for_template(call)
        messages = self._style.fit_messages(call.messages, tool_list or ())
        if not self._supports_tools:
            messages = tools.inject_tools(messages, _callable_tools(call), self._style)
        elif any(message.get("tool_calls") for message in messages):
            form = self._call_form
            messages = form.apply(messages) if form else [tools.write_calls(m, self._style) for m in messages]
        marker = _choose_end_marker(messages) if call.continues_last_message else ""
        if marker:
            messages = [*messages[:-1], _append_end_marker(messages[-1], marker)]
        time_args = {} if created is None else {"strftime_now": datetime.fromtimestamp(created).strftime}
        adds_generation_prompt = call.adds_generation_prompt and not call.continues_last_message
        variables = {**call.template_args, **time_args}
        try:
            text = renderer.render(messages, tool_list, adds_generation_prompt, **variables)
        except InvalidRequest:
            moved = move_system_messages_first(messages)
            if moved == messages:
                raise
            text = renderer.render(moved, tool_list, adds_generation_prompt, **variables)
        return _cut_at_end_marker(text, marker) if marker else text

    @cached_property
    def _call_form(self) -> CallForm | None:
        """The form in which the template takes earlier tool calls; None if it leaves them out."""
        renderer = self._renderers[0]
        return find_call_form(lambda messages: renderer.render(self._style.fit_messages(messages, ()), [PROBE_TOOL]))

    def find_ignored_fields(self, call: ChatCall) -> list[str]:
        """Return the names of request fields that have no effect on this model.

        Raises InvalidRequest for a field that may not be ignored, because the reply would mean something else without
        it.
        """
        if self._template is None:
            return []
        known = self._template.extra_variables(self._tools_for_template(call) is not None)
        found = find_ignored_settings(call.template_settings, known, self._reasoning is not None)
        if call.thinking_budget is not None and not self.reasoning_end_tokens and "thinking" not in found:
            found.append("thinking.budget_tokens")  # no marker could end this model's reasoning
        return found

    def _tools_for_template(self, call: ChatCall) -> list[dict[str, Any]] | None:
        """Return the tools in the form that templates take; None if there are none or the template ignores tools."""
        shown = _callable_tools(call)
        return tools.to_template_tools(shown) if shown and self._supports_tools else None

    async def encode(self, text: str | list[int], tenant: str, *, add_special: bool, param: str) -> list[int]:
        """Return the tokens of the text. Long texts of different tenants take turns."""
        if isinstance(text, list):
            return text
        if len(text) > self.max_context * MAX_CHARS_PER_TOKEN:
            raise ContextLengthExceeded(
                f"{param} has {len(text)} characters; this model's maximum context length is {self.max_context} tokens",
                param=param,
                hint=f"shorten {param}",
            )
        return (await self._encode_all([text], tenant, add_special))[0]

    async def _encode_all(self, texts: Sequence[str], tenant: str, add_special: bool) -> list[list[int]]:
        if sum(map(len, texts)) < LONG_TEXT_CHARS:
            return self.tokenizer.encode_batch(texts, add_special)
        return await self.run_in_thread(tenant, self.tokenizer.encode_batch, texts, add_special)

    async def run_in_thread(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work on a long prompt in the threads that the tenants share fairly."""
        return await self._threads.run(tenant, function, *args, **kwargs)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.token_text(i) for i in ids]

    def truncate(self, ids: list[int], call: GenerationCall) -> list[int]:
        """Return the prompt shortened to the request's `truncate_prompt_tokens`, if that field is set."""
        if call.truncate_prompt_tokens is None:
            return ids
        num_kept = self.max_context - 1 if call.truncate_prompt_tokens < 0 else call.truncate_prompt_tokens
        return ids[:num_kept] if call.keeps_first_tokens or not num_kept else ids[-num_kept:]

    async def params_with_bad_words(self, call: ChatCall | CompletionCall) -> SamplingParams:
        """Return the call's sampling parameters, with its bad words converted to sequences of token ids.

        Each word is added with and without a leading space. Raises InvalidRequest if `allowed_token_ids` has an id
        outside the vocabulary.
        """
        if any(token >= self.tokenizer.vocab_size for token in call.params.allowed_token_ids):
            param = "allowed_token_ids"
            wrong = max(call.params.allowed_token_ids)
            what = f"{param} has {wrong}; the model's token ids are in [0, {self.tokenizer.vocab_size})"
            raise InvalidRequest(what, param=param, hint="POST /tokenize returns the ids of a text")
        if not call.bad_words:
            return call.params
        texts = [text for word in call.bad_words for text in (word.lstrip(), " " + word.lstrip())]
        encoded = await self._encode_all(texts, call.common.tenant, add_special=False)
        words = dict.fromkeys(tuple(ids) for ids in encoded if ids)
        return replace(call.params, bad_words=tuple(words)) if words else call.params

    def check_length(self, ids: Sequence[int], param: str) -> None:
        """Raise an error if the prompt is empty or too long for the model. `param`: request field with the prompt."""
        if len(ids) >= self.max_context:
            raise ContextLengthExceeded(
                f"{param} has {len(ids)} tokens; this model's maximum context length is {self.max_context} tokens, and "
                "the answer needs at least one",
                param=param,
                hint=f"shorten {param}",
                num_tokens=len(ids),
                max_tokens=self.max_context,
            )
        if not ids:
            raise InvalidRequest(f"{param} has no tokens", param=param, hint="send a text that is not empty")


def _callable_tools(call: ChatCall) -> Sequence[Tool]:
    return call.tools if call.tool_choice.mode != "none" else ()


def _reasoning_end_tokens(tokenizer: Tokenizer, style: ReasoningStyle | None) -> list[int]:
    ids = tokenizer.encode(style.end, add_special=False) if style is not None else []
    spelled = b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8", "replace")
    # SentencePiece adds a space before the text.
    return ids if style is not None and spelled.removeprefix(" ") == style.end else []


def _choose_end_marker(messages: list[dict[str, Any]]) -> str:
    """Return a text that occurs in none of the messages, to mark the end of the last message."""
    texts, marker = list(_iterate_texts(messages)), END_MARKER
    while any(marker in text for text in texts):
        marker += marker
    return marker


def _iterate_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (key, *_iterate_texts(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from _iterate_texts(inner)


def _append_end_marker(last_message: dict[str, Any], marker: str) -> dict[str, Any]:
    """Return the message with the marker at the end of its content."""
    content = (last_message.get("content") or "").rstrip()
    return {**last_message, "content": content + marker} if content else last_message


def _cut_at_end_marker(text: str, marker: str) -> str:
    """Return the rendered text before the marker, which ends the last message.

    What the template adds after that message is dropped. Raises InvalidRequest if the text does not contain the marker.
    """
    at = text.rfind(marker)
    if at < 0:
        raise InvalidRequest(
            "the last message cannot be continued: the chat template does not write the text of that message",
            param="messages",
            hint="send text as the content of the last message",
        )
    return text[:at]
