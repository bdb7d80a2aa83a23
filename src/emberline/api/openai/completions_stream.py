"""Renders the deltas of a text completion: as a stream, one chunk per delta, or as one JSON reply."""

from __future__ import annotations

from dataclasses import dataclass, field

from emberline.api.openai.completions import OpenAICompletionCall
from emberline.wire import deltas, sse
from emberline.wire.deltas import Json, ReasoningDelta, TextDelta
from emberline.wire.errors import render_openai_error
from emberline.wire.logprobs import TextLogprobs, render_prompt_logprobs
from emberline.wire.usage import EngineUsage, Usage
from emberline.wire.usage_objects import render_chat_usage


@dataclass(slots=True)
class _CompletionChoice:
    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: TextLogprobs = field(default_factory=TextLogprobs)
    prompt: list[Json | None] | None = None
    ids: list[int] | None = None  # of all tokens; None without return_token_ids
    prompt_ids: list[int] | None = None
    sent_ids: int = 0  # number of `ids` that were sent in chunks
    echoed: int = 0  # number of prompt characters before the generated text
    finish: deltas.Finish | None = None

    def render_finish_fields(self) -> Json:
        assert self.finish is not None, "the choice has no Finish yet"
        return {"finish_reason": self.finish.reason, **self.finish.stop_details()}

    def add_token_ids(self, delta: deltas.TokenIdsDelta) -> None:
        self.ids = [*(self.ids or ()), *delta.ids]
        if delta.prompt_ids:
            self.prompt_ids = list(delta.prompt_ids)

    def take_unsent_token_ids(self) -> Json:
        """Return the next chunk's token id fields, with the ids that no earlier chunk contained."""
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
            _CompletionChoice(index, logprobs=TextLogprobs(as_ids=call.tokens_as_ids))
            for index in range(len(call.prompts) * call.params.n)
        ]
        self._usage: Usage | None = None
        # Most chunks differ only in their text, so the bytes around the text are encoded once.
        is_plain = call.stream and call.params.logprobs is None and not (call.running_usage or call.echo)
        self._around = [self._encode_chunk_frame(choice) for choice in self._choices] if is_plain else []

    def _encode_chunk_frame(self, choice: _CompletionChoice) -> tuple[bytes, bytes]:
        """Return the bytes that precede and the bytes that follow the text in each chunk of this choice."""
        empty = {"index": choice.index, "text": "", "logprobs": None, "finish_reason": None}
        before, after = self._encode_chunk([empty]).split(b'"text":""')
        return before + b'"text":', after

    def write(self, delta: deltas.Delta) -> bytes:
        # Reasoning is text here. Not `match`: isinstance is slow if the object is of a different Struct type.
        if type(delta) is TextDelta or type(delta) is ReasoningDelta:
            return b"" if self._call.echoes_only else self._add_text(delta)
        match delta:
            case deltas.PromptDelta():
                self._choices[delta.choice].prompt = render_prompt_logprobs(delta.tokens)
                return self._add_text(delta) if self._call.echo else b""
            case deltas.TokenIdsDelta():
                self._choices[delta.choice].add_token_ids(delta)
                return b""
            case deltas.Finish():
                return self._finish_choice(delta)
            case deltas.UsageUpdate():
                self._usage = delta.usage
                return b""
            case deltas.ReplyStart():
                self._usage = EngineUsage(input=delta.prompt_tokens, cached_read=delta.cached_tokens)
                return b""
            case deltas.StreamStart():
                return b""
            case deltas.StreamEnd():
                if not self._call.stream:
                    return b""
                usage_chunk = self._encode_chunk([], self._render_usage()) if self._call.includes_usage else b""
                return usage_chunk + sse.DONE_EVENT
        raise AssertionError(f"a text completion cannot contain a {type(delta).__name__}")

    def write_error(self, error: Exception) -> bytes:
        return sse.encode_data_event(render_openai_error(error).body) + sse.DONE_EVENT

    def body(self) -> Json:
        return {
            **self._head,
            "choices": [self._render_choice(choice) for choice in self._choices],
            "usage": self._render_usage(),
        }

    def _add_text(self, delta: deltas.PromptDelta | TextDelta | ReasoningDelta) -> bytes:
        choice = self._choices[delta.choice]
        assert choice.finish is None, "the choice has already finished"
        choice.texts.append(delta.text)
        if self._around and choice.ids is None:
            before, after = self._around[delta.choice]
            return b"%b%b%b" % (before, sse.dumps(delta.text), after)
        top, logprobs = self._call.params.logprobs, None
        if top is not None:
            choice.logprobs.add(delta.tokens, top, choice.echoed)
            logprobs = TextLogprobs(as_ids=self._call.tokens_as_ids).add(delta.tokens, top, choice.echoed).body()
        if isinstance(delta, deltas.PromptDelta):
            choice.echoed = len(delta.text)
        entry = {"index": delta.choice, "text": delta.text, "logprobs": logprobs, "finish_reason": None}
        return self._encode_chunk([entry | (choice.take_unsent_token_ids() if self._call.stream else {})])

    def _finish_choice(self, finish: deltas.Finish) -> bytes:
        choice = self._choices[finish.choice]
        # With max_tokens: 0 the engine's one token may be an end token, but the reply ends by its length.
        choice.finish = deltas.Finish("length", choice=finish.choice) if self._call.echoes_only else finish
        entry = {"index": finish.choice, "text": "", "logprobs": None, **choice.render_finish_fields()}
        return self._encode_chunk([entry | (choice.take_unsent_token_ids() if self._call.stream else {})])

    def _render_choice(self, choice: _CompletionChoice) -> Json:
        logprobs = None if self._call.params.logprobs is None else choice.logprobs.body()
        body = {
            "index": choice.index,
            "text": "".join(choice.texts),
            "logprobs": logprobs,
            **choice.render_finish_fields(),
        }
        body["prompt_logprobs"] = choice.prompt if self._call.shows_prompt_logprobs else None  # vLLM's clients read it
        if choice.ids is not None:
            body |= {"prompt_token_ids": choice.prompt_ids, "token_ids": choice.ids}
        return body

    def _encode_chunk(self, choices: list[Json], usage: Json | None = None) -> bytes:
        if not self._call.stream:
            return b""
        chunk: Json = {**self._head, "choices": choices}
        if self._call.includes_usage:
            chunk["usage"] = self._render_usage() if self._call.running_usage else usage
        return sse.encode_data_event(chunk)

    def _render_usage(self) -> Json | None:
        if self._usage is None:
            return None
        usage = self._usage
        if self._call.echoes_only:  # the engine's one token is not part of the reply
            usage = EngineUsage(input=usage.input, cached_read=usage.cached_read)
        return render_chat_usage(usage, from_engine=True)
