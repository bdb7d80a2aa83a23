"""Answer: what a client was told, in whichever protocol, so far as it must be the same every time."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

DONE = b"data: [DONE]"


@dataclass(slots=True)
class Answer:
    status: int = 0
    text: str = ""  # and whatever else was generated: arguments of tools
    tokens: list[Any] = field(default_factory=list)  # with their log-probabilities, where they were asked for
    finish: list[str] = field(default_factory=list)
    counts: tuple[int, int] | None = None  # tokens of prompt and output, as told in the end
    endings: int = 0  # of a stream
    error: str = ""  # its code or type
    flaw: str = ""  # what no client must ever see

    @property
    def whole(self) -> bool:
        return bool(self.finish) and not self.error

    def against(self, right: Answer) -> str:
        """What is wrong with it, given the right one; an error may come instead of the rest."""
        if self.flaw:
            return self.flaw
        if self.endings > 1 or len(self.finish) > 1:
            return f"it ended {max(self.endings, len(self.finish))} times"
        if not right.text.startswith(self.text):
            return f"said {self.text[-60:]!r}, and not {right.text[: len(self.text)][-60:]!r}"
        if right.tokens[: len(self.tokens)] != self.tokens:
            return "log-probabilities differ"
        if self.whole and (self.text, self.tokens, self.finish, self.counts) != (
            right.text,
            right.tokens,
            right.finish,
            right.counts,
        ):
            return f"ended with {self.finish}, {self.counts}, {len(self.text)} characters; right are {right.finish}, " \
                   f"{right.counts}, {len(right.text)}"  # fmt: skip
        return ""

    @staticmethod
    def of_body(status: int, body: bytes) -> Answer:
        answer = Answer(status)
        try:
            told = json.loads(body)
            if "error" in told:
                answer._fails(told["error"])
            elif "content" in told:
                for block in told["content"]:
                    answer.text += block.get("text") or json.dumps(block.get("input"))
                answer.finish.append(told["stop_reason"])
                answer._counts(told["usage"], "input_tokens", "output_tokens")
            else:
                answer._choice(told["choices"][0], "message")
                answer._counts(told["usage"], "prompt_tokens", "completion_tokens")
        except (ValueError, KeyError, TypeError, IndexError) as e:
            answer.flaw = f"a body that cannot be read: {e!r}, {body[:100]!r}"
        return answer

    @staticmethod
    def of_stream(path: str, raw: bytes) -> Answer:
        """Of all that came until the stream ended, or was cut off."""
        answer = Answer(200)
        *events, rest = raw.split(b"\n\n")
        take = answer._message_event if path == "/v1/messages" else answer._chunk
        for event in events:
            if event.startswith(b":"):
                answer.flaw = f"a comment of ours: {event[:40]!r}"
            elif answer.endings:
                answer.flaw = f"after the end came {event[:80]!r}"
            else:
                try:
                    take(event)
                except (ValueError, KeyError, TypeError, IndexError) as e:
                    answer.flaw = f"an event that cannot be read: {e!r}, {event[:100]!r}"
        if answer.endings and rest:
            answer.flaw = "after the end came half an event"
        return answer

    # -- the OpenAI protocols ------------------------------------------------------------------------------------------

    def _chunk(self, event: bytes) -> None:
        if event == DONE:
            self.endings += 1
            return
        told = json.loads(event.removeprefix(b"data: "))
        if "error" in told:
            self._fails(told["error"])
            return
        if (usage := told.get("usage")) is not None:
            self._counts(usage, "prompt_tokens", "completion_tokens")
        for choice in told["choices"]:
            self._choice(choice, "delta")

    def _choice(self, choice: dict[str, Any], where: str) -> None:
        said = choice.get(where) or {}
        self.text += choice.get("text") or said.get("content") or ""
        for call in said.get("tool_calls") or ():
            self.text += "".join(call["function"].get(part) or "" for part in ("name", "arguments"))
        logprobs = choice.get("logprobs") or {}
        self.tokens += zip(logprobs.get("tokens") or (), logprobs.get("token_logprobs") or (), strict=True)
        self.tokens += ((each["token"], each["logprob"]) for each in logprobs.get("content") or ())
        if (finish := choice.get("finish_reason")) is not None:
            self.finish.append(finish)

    # -- Anthropic's ---------------------------------------------------------------------------------------------------

    def _message_event(self, event: bytes) -> None:
        told = json.loads(event.partition(b"data: ")[2])
        match told["type"]:
            case "error":
                self._fails(told["error"])
                self.endings += 1
            case "message_stop":
                self.endings += 1
            case "content_block_delta":
                self.text += told["delta"].get("text") or told["delta"].get("partial_json") or ""
            case "message_delta":
                self.finish.append(told["delta"]["stop_reason"])
                self._counts(told["usage"], "input_tokens", "output_tokens")

    def _fails(self, error: dict[str, Any]) -> None:
        self.error = str(error.get("code") or error["type"])
        if not error.get("message"):
            self.flaw = "an error that says nothing"

    def _counts(self, usage: dict[str, Any], prompt: str, output: str) -> None:
        self.counts = usage[prompt] + (usage.get("cache_read_input_tokens") or 0), usage[output]
