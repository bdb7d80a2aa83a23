"""ObservedReply: the parts of a reply (text, tool calls, usage) that must be equal every time a request is sent."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

DONE_EVENT = b"data: [DONE]"


@dataclass(slots=True)
class ObservedReply:
    status: int = 0
    text: str = ""  # generated text, names and arguments of tool calls included
    tokens: list[Any] = field(default_factory=list)  # tokens with their log-probabilities, if requested
    finish_reasons: list[str] = field(default_factory=list)
    token_counts: tuple[int, int] | None = None  # prompt and output tokens of the usage field
    ending_count: int = 0  # final events of a stream
    error: str = ""  # code or type of the error
    flaw: str = ""  # violation of the protocol

    @property
    def is_complete(self) -> bool:
        return bool(self.finish_reasons) and not self.error

    def describe_difference_from(self, expected: ObservedReply) -> str:
        """Return how this reply differs from the expected reply, or "" if they are equal.

        A reply that ended early with an error is compared only up to the error."""
        if self.flaw:
            return self.flaw
        if self.ending_count > 1 or len(self.finish_reasons) > 1:
            return f"the reply ended {max(self.ending_count, len(self.finish_reasons))} times"
        if not expected.text.startswith(self.text):
            return f"the text is {self.text[-60:]!r}, expected {expected.text[: len(self.text)][-60:]!r}"
        if expected.tokens[: len(self.tokens)] != self.tokens:
            return "log-probabilities differ"
        if self.is_complete and (self.text, self.tokens, self.finish_reasons, self.token_counts) != (
            expected.text,
            expected.tokens,
            expected.finish_reasons,
            expected.token_counts,
        ):
            return (
                f"got {self.finish_reasons}, {self.token_counts}, {len(self.text)} characters; "
                f"expected {expected.finish_reasons}, {expected.token_counts}, {len(expected.text)}"
            )
        return ""

    @staticmethod
    def from_body(status: int, body: bytes) -> ObservedReply:
        reply = ObservedReply(status)
        try:
            body_json = json.loads(body)
            if "error" in body_json:
                reply._read_error(body_json["error"])
            elif "content" in body_json:
                for block in body_json["content"]:
                    reply.text += block.get("text") or json.dumps(block.get("input"))
                reply.finish_reasons.append(body_json["stop_reason"])
                reply._read_usage(body_json["usage"], "input_tokens", "output_tokens")
            else:
                reply._read_choice(body_json["choices"][0], "message")
                reply._read_usage(body_json["usage"], "prompt_tokens", "completion_tokens")
        except (ValueError, KeyError, TypeError, IndexError) as e:
            reply.flaw = f"the body cannot be parsed: {e!r}, {body[:100]!r}"
        return reply

    @staticmethod
    def from_stream(path: str, body: bytes) -> ObservedReply:
        """Parse an event stream. If the connection broke, parse the part that arrived."""
        reply = ObservedReply(200)
        *events, rest = body.split(b"\n\n")
        read_event = reply._read_anthropic_event if path == "/v1/messages" else reply._read_openai_chunk
        for event in events:
            if event.startswith(b":"):
                reply.flaw = f"the stream contains a comment: {event[:40]!r}"
            elif reply.ending_count:
                reply.flaw = f"the final event was followed by {event[:80]!r}"
            else:
                try:
                    read_event(event)
                except (ValueError, KeyError, TypeError, IndexError) as e:
                    reply.flaw = f"an event cannot be parsed: {e!r}, {event[:100]!r}"
        if reply.ending_count and rest:
            reply.flaw = "the final event was followed by part of an event"
        return reply

    # -- the OpenAI protocols ------------------------------------------------------------------------------------------

    def _read_openai_chunk(self, event: bytes) -> None:
        if event == DONE_EVENT:
            self.ending_count += 1
            return
        chunk = json.loads(event.removeprefix(b"data: "))
        if "error" in chunk:
            self._read_error(chunk["error"])
            return
        if (usage := chunk.get("usage")) is not None:
            self._read_usage(usage, "prompt_tokens", "completion_tokens")
        for choice in chunk["choices"]:
            self._read_choice(choice, "delta")

    def _read_choice(self, choice: dict[str, Any], message_field: str) -> None:
        message = choice.get(message_field) or {}
        self.text += choice.get("text") or message.get("content") or ""
        for call in message.get("tool_calls") or ():
            self.text += "".join(call["function"].get(part) or "" for part in ("name", "arguments"))
        logprobs = choice.get("logprobs") or {}
        self.tokens += zip(logprobs.get("tokens") or (), logprobs.get("token_logprobs") or (), strict=True)
        self.tokens += ((each["token"], each["logprob"]) for each in logprobs.get("content") or ())
        if (finish := choice.get("finish_reason")) is not None:
            self.finish_reasons.append(finish)

    # -- the Anthropic protocol ----------------------------------------------------------------------------------------

    def _read_anthropic_event(self, event: bytes) -> None:
        message = json.loads(event.partition(b"data: ")[2])
        match message["type"]:
            case "error":
                self._read_error(message["error"])
                self.ending_count += 1
            case "message_stop":
                self.ending_count += 1
            case "content_block_delta":
                self.text += message["delta"].get("text") or message["delta"].get("partial_json") or ""
            case "message_delta":
                self.finish_reasons.append(message["delta"]["stop_reason"])
                self._read_usage(message["usage"], "input_tokens", "output_tokens")

    def _read_error(self, error: dict[str, Any]) -> None:
        self.error = str(error.get("code") or error["type"])
        if not error.get("message"):
            self.flaw = "an error has no message"

    def _read_usage(self, usage: dict[str, Any], prompt_field: str, output_field: str) -> None:
        self.token_counts = usage[prompt_field] + (usage.get("cache_read_input_tokens") or 0), usage[output_field]
