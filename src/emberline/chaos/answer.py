"""ObservedReply: the parts of a client's reply that must be equal in every run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

DONE = b"data: [DONE]"


@dataclass(slots=True)
class Answer:
    status: int = 0
    text: str = ""  # generated text, names and arguments of tool calls included
    tokens: list[Any] = field(default_factory=list)  # tokens with their log-probabilities, if requested
    finish: list[str] = field(default_factory=list)
    counts: tuple[int, int] | None = None  # prompt and output tokens of the usage field
    endings: int = 0  # final events of a stream
    error: str = ""  # code or type of the error
    flaw: str = ""  # violation of the protocol

    @property
    def whole(self) -> bool:
        return bool(self.finish) and not self.error

    def against(self, right: Answer) -> str:
        """Return how this reply differs from the expected one, or "".

        A reply that ends early with an error is no difference."""
        if self.flaw:
            return self.flaw
        if self.endings > 1 or len(self.finish) > 1:
            return f"the reply ended {max(self.endings, len(self.finish))} times"
        if not right.text.startswith(self.text):
            return f"the text is {self.text[-60:]!r}, expected {right.text[: len(self.text)][-60:]!r}"
        if right.tokens[: len(self.tokens)] != self.tokens:
            return "log-probabilities differ"
        if self.whole and (self.text, self.tokens, self.finish, self.counts) != (
            right.text,
            right.tokens,
            right.finish,
            right.counts,
        ):
            return f"got {self.finish}, {self.counts}, {len(self.text)} characters; expected {right.finish}, " \
                   f"{right.counts}, {len(right.text)}"  # fmt: skip
        return ""

    @staticmethod
    def of_body(status: int, body: bytes) -> Answer:
        reply = Answer(status)
        try:
            body_json = json.loads(body)
            if "error" in body_json:
                reply._fails(body_json["error"])
            elif "content" in body_json:
                for block in body_json["content"]:
                    reply.text += block.get("text") or json.dumps(block.get("input"))
                reply.finish.append(body_json["stop_reason"])
                reply._counts(body_json["usage"], "input_tokens", "output_tokens")
            else:
                reply._choice(body_json["choices"][0], "message")
                reply._counts(body_json["usage"], "prompt_tokens", "completion_tokens")
        except (ValueError, KeyError, TypeError, IndexError) as e:
            reply.flaw = f"the body cannot be parsed: {e!r}, {body[:100]!r}"
        return reply

    @staticmethod
    def of_stream(path: str, raw: bytes) -> Answer:
        """Parse a stream up to its end, or to where it was cut off."""
        reply = Answer(200)
        *events, rest = raw.split(b"\n\n")
        read_event = reply._message_event if path == "/v1/messages" else reply._chunk
        for event in events:
            if event.startswith(b":"):
                reply.flaw = f"the stream contains a comment: {event[:40]!r}"
            elif reply.endings:
                reply.flaw = f"the final event was followed by {event[:80]!r}"
            else:
                try:
                    read_event(event)
                except (ValueError, KeyError, TypeError, IndexError) as e:
                    reply.flaw = f"an event cannot be parsed: {e!r}, {event[:100]!r}"
        if reply.endings and rest:
            reply.flaw = "the final event was followed by part of an event"
        return reply

    # -- the OpenAI protocols ------------------------------------------------------------------------------------------

    def _chunk(self, event: bytes) -> None:
        if event == DONE:
            self.endings += 1
            return
        chunk = json.loads(event.removeprefix(b"data: "))
        if "error" in chunk:
            self._fails(chunk["error"])
            return
        if (usage := chunk.get("usage")) is not None:
            self._counts(usage, "prompt_tokens", "completion_tokens")
        for choice in chunk["choices"]:
            self._choice(choice, "delta")

    def _choice(self, choice: dict[str, Any], where: str) -> None:
        message = choice.get(where) or {}
        self.text += choice.get("text") or message.get("content") or ""
        for call in message.get("tool_calls") or ():
            self.text += "".join(call["function"].get(part) or "" for part in ("name", "arguments"))
        logprobs = choice.get("logprobs") or {}
        self.tokens += zip(logprobs.get("tokens") or (), logprobs.get("token_logprobs") or (), strict=True)
        self.tokens += ((each["token"], each["logprob"]) for each in logprobs.get("content") or ())
        if (finish := choice.get("finish_reason")) is not None:
            self.finish.append(finish)

    # -- the Anthropic protocol ----------------------------------------------------------------------------------------

    def _message_event(self, event: bytes) -> None:
        message = json.loads(event.partition(b"data: ")[2])
        match message["type"]:
            case "error":
                self._fails(message["error"])
                self.endings += 1
            case "message_stop":
                self.endings += 1
            case "content_block_delta":
                self.text += message["delta"].get("text") or message["delta"].get("partial_json") or ""
            case "message_delta":
                self.finish.append(message["delta"]["stop_reason"])
                self._counts(message["usage"], "input_tokens", "output_tokens")

    def _fails(self, error: dict[str, Any]) -> None:
        self.error = str(error.get("code") or error["type"])
        if not error.get("message"):
            self.flaw = "an error has no message"

    def _counts(self, usage: dict[str, Any], prompt: str, output: str) -> None:
        self.counts = usage[prompt] + (usage.get("cache_read_input_tokens") or 0), usage[output]
