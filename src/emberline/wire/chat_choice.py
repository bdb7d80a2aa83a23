"""Renders one choice of a chat completion: an entry in `choices` for each delta, or for the whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from emberline.wire.citations import render_chat_citation
from emberline.wire.deltas import (
    CitationDelta,
    Finish,
    Json,
    ReasoningDelta,
    RefusalDelta,
    SignatureDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from emberline.wire.finish_reasons import TO_CHAT
from emberline.wire.logprobs import render_chat_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChatOptions:
    """Options of chat completions that Emberline's engine generates; translated replies have no options."""

    head_fields: Json  # fields that follow the model in every chunk
    num_choices: int = 1
    running_usage: bool = False  # every chunk has the usage so far
    has_logprobs: bool = False
    tokens_as_ids: bool = False  # logprobs write each token as "token_id:N"
    uses_legacy_functions: bool = False  # the reply has function_call in place of tool_calls
    shows_reasoning: bool = True
    echoed_text: str = ""  # text that the reply has before the generated text
    metadata: dict[str, str] = field(default_factory=dict)  # repeated in the reply


ChoiceDelta = TextDelta | ReasoningDelta | RefusalDelta | ToolCallStart | ToolCallArguments | Finish


@dataclass(slots=True)
class ChatChoiceWriter:
    """Renders one choice. `add` collects a delta and returns the entry for `choices` in a stream chunk."""

    index: int
    engine: EngineChatOptions | None = None  # None: a provider's reply
    has_opened: bool = False  # the role has been sent
    texts: list[str] = field(default_factory=list)
    reasoning_texts: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    logprobs: list[Json] | None = None
    reasoning_logprobs: list[Json] = field(default_factory=list)
    annotations: list[Json] = field(default_factory=list)
    next_signature: str = ""  # Gemini's signature of the next tool call
    ids: list[int] | None = None  # of all tokens; None without return_token_ids
    num_sent_ids: int = 0  # number of `ids` that were sent in chunks
    finish: Finish | None = None

    def render_opening_entry(self) -> Json:
        """Return an entry for `choices`: with the role if it is the choice's first, else with an empty delta."""
        role = {} if self.has_opened else {"role": "assistant"}
        self.has_opened = True
        return {"index": self.index, "delta": role, "logprobs": None, "finish_reason": None}

    def add(self, delta: ChoiceDelta) -> Json:
        assert self.finish is None, "the choice has already finished"
        row = self.render_opening_entry()
        match delta:
            case TextDelta():
                self._add_text(delta, row)
            case ReasoningDelta():
                self._add_reasoning(delta, row)
            case RefusalDelta():
                self.refusals.append(delta.text)
                row["delta"]["refusal"] = delta.text
            case ToolCallStart() | ToolCallArguments():
                self._add_call(delta, row)
            case Finish():
                self._add_finish(delta, row)
        if self.ids is not None:
            row["token_ids"], self.num_sent_ids = self.ids[self.num_sent_ids :], len(self.ids)
        return row

    def collect(self, delta: CitationDelta | SignatureDelta) -> None:
        """Keep a citation or signature, to be sent as part of a later chunk."""
        if isinstance(delta, CitationDelta):
            self.annotations.append(render_chat_citation(delta.citation))
        elif delta.origin == "gemini":
            self.next_signature = delta.signature

    def render_annotations_entry(self) -> Json:
        """Return one entry for `choices` with all annotations: clients do not join lists of several chunks."""
        row = self.render_opening_entry()
        row["delta"]["annotations"] = self.annotations
        return row

    def _add_text(self, delta: TextDelta, row: Json) -> None:
        row["delta"]["content"] = delta.text
        logprobs = delta.logprobs
        if delta.tokens:
            logprobs = render_chat_logprobs(delta.tokens, as_ids=self.engine is not None and self.engine.tokens_as_ids)
        if delta.text or delta.tokens:
            self.texts.append(delta.text)
        if logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *logprobs]
            row["logprobs"] = {"content": logprobs, "refusal": None}

    def _add_reasoning(self, delta: ReasoningDelta, row: Json) -> None:
        self.reasoning_texts.append(delta.text)
        row["delta"]["reasoning_content"] = delta.text
        if delta.tokens:
            logprobs = render_chat_logprobs(delta.tokens, as_ids=self.engine is not None and self.engine.tokens_as_ids)
            self.reasoning_logprobs += logprobs
            row["logprobs"] = {"content": [], "refusal": None, "reasoning_content": logprobs}

    def _add_call(self, delta: ToolCallStart | ToolCallArguments, row: Json) -> None:
        if isinstance(delta, ToolCallStart):
            assert delta.slot == len(self.calls), "tool calls must start in order"
            function = {"name": delta.name, "arguments": ""}
            entry: Json = {"id": delta.id, "type": "function", "function": function}
            if self.next_signature:  # the field of Google's OpenAI-compatible API
                entry["extra_content"] = {"google": {"thought_signature": self.next_signature}}
                self.next_signature = ""
            self.calls.append({**entry, "function": dict(function)})
        else:
            entry = {"function": {"arguments": delta.text}}
            self.calls[delta.slot]["function"]["arguments"] += delta.text
        if self.engine is None or not self.engine.uses_legacy_functions:
            row["delta"]["tool_calls"] = [{"index": delta.slot, **entry}]
        elif delta.slot == 0:  # the older protocol allows one call
            row["delta"]["function_call"] = entry["function"]

    def _add_finish(self, finish: Finish, row: Json) -> None:
        self.finish = finish
        if self.engine is not None and not self.texts and not self.calls:
            row["delta"]["content"] = ""  # the joined chunks then have the same empty text as the plain reply
        row |= self._render_finish_fields()

    def _render_finish_fields(self) -> Json:
        assert self.finish is not None, "the choice has no Finish yet"
        reason = TO_CHAT[self.finish.reason]
        if self.engine is None:
            return {"finish_reason": reason}
        if self.engine.uses_legacy_functions and reason == "tool_calls":
            reason = "function_call"
        return {"finish_reason": reason, **self.finish.stop_details()}

    def _render_message(self) -> Json:
        refusal = "".join(self.refusals) or None
        content = "".join(self.texts) if self.texts or not (self.calls or refusal) else None
        message: Json = {"role": "assistant", "content": content, "refusal": refusal}
        if self.reasoning_texts:
            message["reasoning_content"] = "".join(self.reasoning_texts)
        if self.calls and self.engine is not None and self.engine.uses_legacy_functions:
            message["function_call"] = self.calls[0]["function"]
        elif self.calls:
            message["tool_calls"] = self.calls
        if self.annotations:
            message["annotations"] = self.annotations
        return message

    def body(self) -> Json:
        logprobs: Json | None = None
        if self.logprobs is not None or self.reasoning_logprobs:
            logprobs = {"content": self.logprobs or [], "refusal": None}
        if logprobs and self.reasoning_logprobs:
            logprobs["reasoning_content"] = self.reasoning_logprobs
        body = {
            "index": self.index,
            "message": self._render_message(),
            "logprobs": logprobs,
            **self._render_finish_fields(),
        }
        return body if self.ids is None else {**body, "token_ids": self.ids}
