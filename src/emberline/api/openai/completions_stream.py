"""Writes the reply of a text completion: one chunk per delta, or the whole reply from the same deltas."""

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
)
from emberline.api.errors import openai_error
from emberline.api.openai.completions import OpenAICompletionCall
from emberline.api.openai.logprobs import TextLogprobs, prompt_logprobs
from emberline.api.openai.usage import render_usage


@dataclass(slots=True)
class _Choice:
    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: TextLogprobs = field(default_factory=TextLogprobs)
    prompt: list[dict[str, Any] | None] | None = None
    ids: list[int] | None = None  # of all tokens; None without return_token_ids
    prompt_ids: list[int] | None = None
    sent_ids: int = 0  # number of `ids` that were sent in chunks
    echoed: int = 0  # number of prompt characters before the generated text
    finish: Finish | None = None

    def finish_fields(self) -> dict[str, Any]:
        assert self.finish is not None, "the choice has no Finish yet"
        return {"finish_reason": self.finish.reason, **self.finish.stop_details()}

    def add_ids(self, delta: TokenIdsDelta) -> None:
        self.ids = [*(self.ids or ()), *delta.ids]
        if delta.prompt_ids:
            self.prompt_ids = list(delta.prompt_ids)

    def new_ids(self) -> dict[str, Any]:
        """Return the chunk fields with the token ids that were not sent yet."""
        if self.ids is None:
            return {}
        prompt = {} if self.sent_ids else {"prompt_token_ids": self.prompt_ids}
        new, self.sent_ids = self.ids[self.sent_ids :], len(self.ids)
        return {**prompt, "token_ids": new}


class CompletionReplyWriter:
    def __init__(self, call: OpenAICompletionCall, id: str, created: int, fingerprint: str) -> None:
        self._call = call
        self._head = {"id": id, "object": "text_completion", "created": created}
        self._head |= {"model": call.common.model, "system_fingerprint": fingerprint}
        self._choices = [
            _Choice(index, logprobs=TextLogprobs(as_ids=call.tokens_as_ids))
            for index in range(len(call.prompts) * call.params.n)
        ]
        self._usage_so_far = TokenUsage(0, 0)
        self._usage: dict[str, Any] | None = None
        # Most chunks differ only in their text, so the bytes around the text are encoded once.
        is_plain = call.stream and call.params.logprobs is None and not (call.running_usage or call.echo)
        self._around = [self._encode_around(choice) for choice in self._choices] if is_plain else []

    def _encode_around(self, choice: _Choice) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text of a chunk."""
        empty = {"index": choice.index, "text": "", "logprobs": None, "finish_reason": None}
        [chunk] = self._chunk([empty])
        before, after = chunk.split(b'"text":""')
        return before + b'"text":', after

    def write_start(self) -> list[bytes]:
        return []

    def write(self, delta: Delta) -> list[bytes]:
        match delta:
            case PromptDelta():
                self._choices[delta.index].prompt = prompt_logprobs(delta.tokens)
                return self._add_text(delta) if self._call.echo else []
            case TextDelta() | ReasoningDelta():  # this protocol has no reasoning: all of it is text
                return [] if self._call.echoes_only else self._add_text(delta)
            case TokenIdsDelta():
                self._choices[delta.index].add_ids(delta)
                return []
            case Finish():
                return self._finish(delta)
            case TokenUsage():
                counted = TokenUsage(delta.prompt_tokens, 0, delta.cached_tokens) if self._call.echoes_only else delta
                self._usage = render_usage(counted)
                return self._chunk([], self._usage) if self._call.includes_usage else []
            case ReplyStart():
                self._usage_so_far = TokenUsage(delta.prompt_tokens, 0, delta.cached_tokens)
                return []
            case RunningUsage():
                self._usage_so_far = (
                    self._usage_so_far if self._call.echoes_only else replace(self._usage_so_far, **asdict(delta))
                )
                return []
        raise AssertionError(f"{type(delta).__name__} is not part of this protocol")

    def write_end(self) -> list[bytes]:
        return [sse.DONE_EVENT]

    def write_error(self, error: Exception) -> list[bytes]:
        return [sse.data_event(openai_error(error).body), sse.DONE_EVENT]

    def body(self) -> dict[str, Any]:
        return {**self._head, "choices": [self._body(choice) for choice in self._choices], "usage": self._usage}

    def _add_text(self, delta: PromptDelta | TextDelta | ReasoningDelta) -> list[bytes]:
        choice = self._choices[delta.index]
        assert choice.finish is None, "the choice has already finished"
        choice.texts.append(delta.text)
        if self._around and choice.ids is None:
            before, after = self._around[delta.index]
            return [b"%b%b%b" % (before, sse.dumps(delta.text), after)]
        top, logprobs = self._call.params.logprobs, None
        if top is not None:
            choice.logprobs.add(delta.tokens, top, choice.echoed)
            logprobs = TextLogprobs(as_ids=self._call.tokens_as_ids).add(delta.tokens, top, choice.echoed).body()
        if isinstance(delta, PromptDelta):
            choice.echoed = len(delta.text)
        entry = {"index": delta.index, "text": delta.text, "logprobs": logprobs, "finish_reason": None}
        return self._chunk([entry | (choice.new_ids() if self._call.stream else {})])

    def _finish(self, finish: Finish) -> list[bytes]:
        choice = self._choices[finish.index]
        # With max_tokens: 0 the engine's one token may be an end token, but the reply ends by its length.
        choice.finish = Finish(finish.index, "length") if self._call.echoes_only else finish
        entry = {"index": finish.index, "text": "", "logprobs": None, **choice.finish_fields()}
        return self._chunk([entry | (choice.new_ids() if self._call.stream else {})])

    def _body(self, choice: _Choice) -> dict[str, Any]:
        logprobs = None if self._call.params.logprobs is None else choice.logprobs.body()
        body = {"index": choice.index, "text": "".join(choice.texts), "logprobs": logprobs, **choice.finish_fields()}
        body["prompt_logprobs"] = choice.prompt if self._call.shows_prompt_logprobs else None  # vLLM's clients read it
        if choice.ids is not None:
            body |= {"prompt_token_ids": choice.prompt_ids, "token_ids": choice.ids}
        return body

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> list[bytes]:
        if not self._call.stream:
            return []
        chunk = {**self._head, "choices": choices}
        if self._call.includes_usage:
            chunk["usage"] = render_usage(self._usage_so_far) if self._call.running_usage and usage is None else usage
        return [sse.data_event(chunk)]
