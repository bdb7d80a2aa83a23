"""Renders deltas as a chat completion: as the chunks of a stream, or as one JSON reply.

The first chunk of a choice contains the role, its last chunk the finish_reason. Usage, if requested, has its own chunk.
"""

from __future__ import annotations

import msgspec

from emberline.wire import sse
from emberline.wire.chat_choice import ChatChoiceWriter, ChoiceDelta, EngineChatOptions
from emberline.wire.deltas import (
    CitationDelta,
    Delta,
    Finish,
    Json,
    PromptDelta,
    ReasoningDelta,
    ReplyStart,
    SignatureDelta,
    StreamEnd,
    StreamStart,
    TextDelta,
    TokenIdsDelta,
    ToolCallArguments,
    UsageUpdate,
)
from emberline.wire.errors import render_openai_error
from emberline.wire.logprobs import render_prompt_logprobs
from emberline.wire.reply_context import ReplyContext
from emberline.wire.usage import EngineUsage, Usage
from emberline.wire.usage_objects import render_chat_usage


class _ChunkFrame(msgspec.Struct):
    """The bytes around the text in the most common kinds of chunks of a choice, encoded only once."""

    reasoning: bytes
    after: bytes
    text: bytes = b""  # b"" until the choice has a text
    arguments: bytes = b""  # b"" for the older protocol's function_call


class ChatWriter:
    def __init__(self, context: ReplyContext, engine: EngineChatOptions | None = None, *, stream: bool = True) -> None:
        """`engine` is given if Emberline's engine generates the reply, and None if the gateway translates it."""
        self._context = context
        self._engine = engine
        self._stream = stream
        self._identity: Json = {}  # fields of every chunk and of the whole reply, without id and object
        self._id = ""
        self._head = b""  # start of every chunk, up to the list of choices
        self._tail = b',"usage":null}\n\n' if context.include_usage else b"}\n\n"
        self._choices: dict[int, ChatChoiceWriter] = {}
        if engine is not None:
            self._choices = {index: ChatChoiceWriter(index, engine) for index in range(engine.num_choices)}
        # Most chunks differ only in their text, unless they have logprobs, token ids or the usage so far.
        self._has_frames = stream and (engine is None or not (engine.running_usage or engine.has_logprobs))
        self._frames: dict[int, _ChunkFrame] = {}  # choice -> frame, for choices that have been opened
        self._usage: Usage | None = None
        self._prompt_logprobs: list[Json | None] | None = None
        self._prompt_ids: list[int] | None = None  # of a stream: only until a chunk has sent them

    def write(self, delta: Delta) -> bytes:
        if type(delta) is TextDelta:  # not `match`: isinstance is slow if the object is of a different Struct type
            frame = self._frames.get(delta.choice)
            if frame is not None and frame.text and delta.logprobs is None:
                return b"%b%b%b" % (frame.text, sse.dumps(delta.text), frame.after)
            return self._write_choice_delta(delta)
        if type(delta) is ToolCallArguments:
            frame = self._frames.get(delta.choice)
            if frame is not None and frame.arguments:
                text = sse.dumps(delta.text)
                return b'%b%d,"function":{"arguments":%b}}]%b' % (frame.arguments, delta.slot, text, frame.after)
            return self._write_choice_delta(delta)
        if type(delta) is ReasoningDelta:
            if self._engine is not None and not self._engine.shows_reasoning:
                return b""
            if (frame := self._frames.get(delta.choice)) is not None:
                return b"%b%b%b" % (frame.reasoning, sse.dumps(delta.text), frame.after)
            return self._write_choice_delta(delta)
        match delta:
            case CitationDelta() | SignatureDelta():
                self._get_choice(delta.choice).collect(delta)
            case UsageUpdate():
                self._usage = delta.usage
            case StreamStart():
                self._set_identity(delta)
            case StreamEnd():
                return self._end_stream() if self._stream else b""
            case ReplyStart() | PromptDelta() | TokenIdsDelta():
                return self._write_engine_delta(delta)
            case _:
                return self._write_choice_delta(delta)
        return b""

    def write_error(self, error: Exception) -> bytes:
        return sse.encode_data_event(render_openai_error(error).body) + sse.DONE_EVENT

    def body(self) -> Json:
        choices = [choice.body() for choice in self._choices.values()]
        body: Json = {"id": self._id, "object": "chat.completion", **self._identity, "choices": choices}
        if self._usage is not None:
            body["usage"] = self._render_usage()
        if self._engine is None:
            return body
        if self._engine.metadata:
            body["metadata"] = self._engine.metadata
        body["prompt_logprobs"] = self._prompt_logprobs  # null if not requested: vLLM's clients always read the field
        if self._prompt_ids is not None:
            body["prompt_token_ids"] = self._prompt_ids
        return body

    def _set_identity(self, start: StreamStart) -> None:
        assert not self._head, "a stream has one start"
        self._context.set_identity(start)
        self._id = start.id
        self._identity = {"created": start.created, "model": start.model}
        if self._engine is not None:
            self._identity |= self._engine.head_fields
        head = {"id": start.id, "object": "chat.completion.chunk", **self._identity}
        self._head = b"data: " + sse.dumps(head)[:-1] + b',"choices":'

    def _write_engine_delta(self, delta: ReplyStart | PromptDelta | TokenIdsDelta) -> bytes:
        assert self._engine is not None, f"{type(delta).__name__} is a delta of the engine"
        match delta:
            case ReplyStart():
                self._usage = EngineUsage(input=delta.prompt_tokens, cached_read=delta.cached_tokens)
                text = self._engine.echoed_text
                return b"".join([self._write_choice_delta(TextDelta(text, index)) for index in self._choices if text])
            case PromptDelta():
                self._prompt_logprobs = render_prompt_logprobs(delta.tokens)
            case TokenIdsDelta():
                if delta.prompt_ids:
                    self._prompt_ids = list(delta.prompt_ids)
                choice = self._choices[delta.choice]
                choice.ids = [*(choice.ids or ()), *delta.ids]
        return b""

    def _get_choice(self, index: int) -> ChatChoiceWriter:
        if (choice := self._choices.get(index)) is None:
            choice = self._choices[index] = ChatChoiceWriter(index)
        return choice

    def _write_choice_delta(self, delta: ChoiceDelta) -> bytes:
        assert self._head, "a stream starts before its first content"
        choice = self._get_choice(delta.choice)
        rows = self._render_opening_entries(choice)
        if isinstance(delta, Finish) and choice.annotations and self._stream:
            rows.append(choice.render_annotations_entry())
        rows.append(choice.add(delta))
        if not self._stream:
            return b""
        if self._has_frames and choice.ids is None:
            self._add_chunk_frame(choice)
        return b"".join([self._encode_chunk(sse.dumps(row)) for row in rows])

    def _render_opening_entries(self, choice: ChatChoiceWriter) -> list[Json]:
        """Return the `choices` entries to send before the first delta of `choice`, each in its own chunk.

        In the gateway, a new choice gets an entry with empty text. If the engine generates one choice, there is no
        entry: the role is sent with the first content. If it generates several choices, each choice up to this one gets
        an entry with only the role. Clients order choices by their first chunks, and OpenAI's client would count
        logprobs twice if the first chunk of a later choice had any.
        """
        if self._engine is None:
            return [] if choice.has_opened else [choice.add(TextDelta("", choice.index))]
        first = list(self._choices.values())[: choice.index + 1] if len(self._choices) > 1 else []
        return [other.render_opening_entry() for other in first if not other.has_opened]

    def _add_chunk_frame(self, choice: ChatChoiceWriter) -> None:
        start = b'%b[{"index":%d,"delta":{' % (self._head, choice.index)
        if (frame := self._frames.get(choice.index)) is None:
            frame = _ChunkFrame(
                start + b'"reasoning_content":', b'},"logprobs":null,"finish_reason":null}]' + self._tail
            )
            if self._engine is None or not self._engine.uses_legacy_functions:
                frame.arguments = start + b'"tool_calls":[{"index":'
            self._frames[choice.index] = frame
        if choice.texts:
            frame.text = start + b'"content":'

    def _encode_chunk(self, row: bytes) -> bytes:
        tail = self._tail
        if self._prompt_ids is not None:
            tail = b',"prompt_token_ids":%b%b' % (sse.dumps(self._prompt_ids), tail)
            self._prompt_ids = None
        if self._engine is not None and self._engine.running_usage:
            tail = b'%b,"usage":%b}\n\n' % (tail.removesuffix(self._tail), sse.dumps(self._render_usage()))
        return b"%b[%b]%b" % (self._head, row, tail)

    def _render_usage(self) -> Json | None:
        return None if self._usage is None else render_chat_usage(self._usage, from_engine=self._engine is not None)

    def _end_stream(self) -> bytes:
        if not self._context.include_usage:
            return sse.DONE_EVENT
        return b'%b[],"usage":%b}\n\n%b' % (self._head, sse.dumps(self._render_usage()), sse.DONE_EVENT)
