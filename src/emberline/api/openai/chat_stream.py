"""Writes the reply of a chat completion: one chunk per delta, or the whole reply from the same deltas."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from emberline.api import sse
from emberline.api.deltas import (
    Delta,
    Finish,
    PromptDelta,
    ReasoningDelta,
    ReplyStart,
    RunningUsage,
    TextDelta,
    TokenIdsDelta,
    TokenUsage,
    ToolCallArguments,
    ToolCallStart,
)
from emberline.api.errors import openai_error
from emberline.api.openai.chat import OpenAIChatCall
from emberline.api.openai.logprobs import chat_logprobs, prompt_logprobs
from emberline.api.openai.usage import render_usage
from emberline.core.request import Priority


@dataclass(slots=True)
class _Choice:
    """Collects the deltas of one choice; `add` also returns the delta as the choice of a stream chunk."""

    index: int
    legacy: bool  # the reply uses function_call in place of tool_calls
    tokens_as_ids: bool = False
    texts: list[str] = field(default_factory=list)
    reasoning_texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)
    reasoning_tokens: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] | None = None  # of all tokens; None without return_token_ids
    sent_ids: int = 0  # number of `ids` that were sent in chunks
    finish: Finish | None = None
    has_opened: bool = False

    def add(self, delta: TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | Finish) -> dict[str, Any]:
        assert self.finish is None, "the choice has already finished"
        chunk = self.open()
        match delta:
            case TextDelta():
                self._add_text(delta, chunk)
            case ReasoningDelta():
                self._add_reasoning(delta, chunk)
            case ToolCallStart() | ToolCallArguments():
                self._call(delta, chunk)
            case Finish():
                self._finish(delta, chunk)
        if self.ids is not None:
            chunk["token_ids"], self.sent_ids = self.ids[self.sent_ids :], len(self.ids)
        return chunk

    def open(self) -> dict[str, Any]:
        role = {} if self.has_opened else {"role": "assistant"}
        self.has_opened = True
        return {"index": self.index, "delta": role, "logprobs": None, "finish_reason": None}

    def _add_text(self, delta: TextDelta, chunk: dict[str, Any]) -> None:
        self.texts.append(delta.text)
        chunk["delta"]["content"] = delta.text
        if delta.tokens:
            tokens = chat_logprobs(delta.tokens, as_ids=self.tokens_as_ids)
            self.tokens += tokens
            chunk["logprobs"] = {"content": tokens, "refusal": None}

    def _add_reasoning(self, delta: ReasoningDelta, chunk: dict[str, Any]) -> None:
        self.reasoning_texts.append(delta.text)
        chunk["delta"]["reasoning_content"] = delta.text
        if delta.tokens:
            tokens = chat_logprobs(delta.tokens, as_ids=self.tokens_as_ids)
            self.reasoning_tokens += tokens
            chunk["logprobs"] = {"content": [], "refusal": None, "reasoning_content": tokens}

    def _call(self, delta: ToolCallStart | ToolCallArguments, chunk: dict[str, Any]) -> None:
        if isinstance(delta, ToolCallStart):
            assert delta.slot == len(self.calls), "tool calls must start in order"
            function = {"name": delta.name, "arguments": ""}
            entry: dict[str, Any] = {"id": delta.id, "type": "function", "function": function}
            self.calls.append({**entry, "function": dict(function)})
        else:
            entry = {"function": {"arguments": delta.text}}
            self.calls[delta.slot]["function"]["arguments"] += delta.text
        if not self.legacy:
            chunk["delta"]["tool_calls"] = [{"index": delta.slot, **entry}]
        elif delta.slot == 0:  # the older protocol allows one call
            chunk["delta"]["function_call"] = entry["function"]

    def _finish(self, finish: Finish, chunk: dict[str, Any]) -> None:
        self.finish = finish
        if not self.texts and not self.calls:
            chunk["delta"]["content"] = ""  # the joined chunks then have the same empty text as the plain reply
        chunk |= self._finish_fields()

    def _finish_fields(self) -> dict[str, Any]:
        assert self.finish is not None, "the choice has no Finish yet"
        reason = "function_call" if self.legacy and self.finish.reason == "tool_calls" else self.finish.reason
        return {"finish_reason": reason, **self.finish.stop_details()}

    def message(self) -> dict[str, Any]:
        content = None if self.calls and not self.texts else "".join(self.texts)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning_texts:
            message["reasoning_content"] = "".join(self.reasoning_texts)
        if self.calls and self.legacy:
            message["function_call"] = self.calls[0]["function"]
        elif self.calls:
            message["tool_calls"] = self.calls
        return message

    def body(self) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if self.tokens or self.reasoning_tokens:
            logprobs = {"content": self.tokens, "refusal": None}
        if logprobs and self.reasoning_tokens:
            logprobs["reasoning_content"] = self.reasoning_tokens
        body = {"index": self.index, "message": self.message(), "logprobs": logprobs, **self._finish_fields()}
        return body if self.ids is None else {**body, "token_ids": self.ids}


class ChatReplyWriter:
    """The first chunk of a choice has the role, the last its finish_reason; requested usage is a chunk of its own."""

    def __init__(self, call: OpenAIChatCall, id: str, created: int, fingerprint: str) -> None:
        self._call = call
        self._id = id
        tier = "flex" if call.common.priority is Priority.BATCH else "default"
        self._tail = {
            "created": created,
            "model": call.common.model,
            "system_fingerprint": fingerprint,
            "service_tier": tier,
        }
        self._choices = [
            _Choice(index, call.uses_legacy_functions, call.tokens_as_ids) for index in range(call.params.n)
        ]
        self._usage_so_far = TokenUsage(0, 0)
        self._usage: dict[str, Any] | None = None
        self._prompt: list[dict[str, Any] | None] | None = None
        self._prompt_ids: list[int] | None = None  # of a stream: only until a chunk has sent them
        # Most chunks differ only in their text, so the bytes around the text are encoded once.
        is_plain = call.stream and not call.running_usage and call.params.logprobs is None
        self._around = [self._encode_around(index) for index in range(call.params.n)] if is_plain else []

    def _encode_around(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text of a chunk."""
        chunk = self._chunk([{"index": index, "delta": {"content": ""}, "logprobs": None, "finish_reason": None}])
        before, after = chunk.split(b'"content":""')
        return before + b'"content":', after

    def write_start(self) -> list[bytes]:
        return []

    def write(self, delta: Delta) -> list[bytes]:
        match delta:
            case ReplyStart():
                self._usage_so_far = TokenUsage(delta.prompt_tokens, 0, delta.cached_tokens)
                echoed = [
                    TextDelta(choice.index, self._call.echoed_text)
                    for choice in self._choices
                    if self._call.echoed_text
                ]
                return [event for each in echoed for event in self.write(each)]
            case RunningUsage():
                self._usage_so_far = replace(self._usage_so_far, **asdict(delta))
                return []
            case PromptDelta():
                self._prompt = prompt_logprobs(delta.tokens)
                return []
            case TokenIdsDelta():
                if delta.prompt_ids:
                    self._prompt_ids = list(delta.prompt_ids)
                choice = self._choices[delta.index]
                choice.ids = [*(choice.ids or ()), *delta.ids]
                return []
            case TokenUsage():
                self._usage = render_usage(delta)
                return [self._chunk([], self._usage)] if self._call.includes_usage else []
            case TextDelta() if (
                self._around and (choice := self._choices[delta.index]).has_opened and choice.ids is None
            ):
                assert choice.finish is None, "the choice has already finished"
                choice.texts.append(delta.text)
                before, after = self._around[delta.index]
                return [b"%b%b%b" % (before, sse.dumps(delta.text), after)]
            case ReasoningDelta() if not self._call.shows_reasoning:
                return []
            case _:
                chunks = [*self._opening_chunks(delta.index), self._choices[delta.index].add(delta)]
                return [self._chunk([chunk]) for chunk in chunks] if self._call.stream else []

    def write_end(self) -> list[bytes]:
        return [sse.DONE_EVENT]

    def write_error(self, error: Exception) -> list[bytes]:
        return [sse.data_event(openai_error(error).body), sse.DONE_EVENT]

    def body(self) -> dict[str, Any]:
        body = {"id": self._id, "object": "chat.completion", **self._tail}
        body |= {"choices": [choice.body() for choice in self._choices], "usage": self._usage}
        if self._call.metadata:
            body["metadata"] = self._call.metadata
        body["prompt_logprobs"] = self._prompt  # null if not requested: vLLM's clients always read the field
        if self._prompt_ids is not None:
            body["prompt_token_ids"] = self._prompt_ids
        return body

    def _opening_chunks(self, index: int) -> list[dict[str, Any]]:
        """Return the opening chunks that must precede a delta of this choice, if there are several choices.

        Each choice opens with its own chunk, in order: clients order choices by their first chunk, and OpenAI's client
        counts logprobs in the first chunk of a later choice twice.
        """
        first_choices = self._choices[: index + 1] if len(self._choices) > 1 else []
        return [choice.open() for choice in first_choices if not choice.has_opened]

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        chunk = {"id": self._id, "object": "chat.completion.chunk", **self._tail, "choices": choices}
        if self._prompt_ids is not None:
            chunk["prompt_token_ids"], self._prompt_ids = self._prompt_ids, None
        if self._call.includes_usage:
            chunk["usage"] = render_usage(self._usage_so_far) if self._call.running_usage and usage is None else usage
        return sse.data_event(chunk)
