"""CompletionClient sends completions to any OpenAI-compatible URL and records when each event arrived at the client."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import msgspec

from emberline.bench.connection import LeanHTTPConnection, ServerUnreachable, UnexpectedHTTPStatus, events
from emberline.core.errors import EngineUnavailable, ModelNotFound
from emberline.core.events import Timing


@dataclass(slots=True)
class RequestTrace:
    """One request: when it was sent, when each event with new text arrived, and the server's token counts."""

    sent: float
    marks: list[float] = field(default_factory=list)
    ended: float | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None
    abandoned: bool = False

    @property
    def timing(self) -> Timing:
        first = self.marks[0] if self.marks else None
        return Timing(self.sent, first_token=first, finished=self.ended)

    @property
    def gaps(self) -> list[float]:
        """Return the inter-token latencies that a client sees, in seconds."""
        return [b - a for a, b in pairwise(self.marks)]


class CompletionClient:
    def __init__(
        self, url: str, model: str, *, chat: bool = False, plain: bool = False, key: str | None = None
    ) -> None:
        """`plain` leaves out what only some servers accept: token ids as a prompt, ignore_eos."""
        self._url, self._key = url.rstrip("/"), key
        self._model, self._chat, self._plain = model, chat, plain
        base = urlsplit(self._url).path
        self._path = base + ("/chat/completions" if chat else "/completions")
        self._free: list[LeanHTTPConnection] = []

    async def complete(
        self, prompt: list[int], tokens: int, leave_after: int | None = None, *, into: RequestTrace | None = None
    ) -> RequestTrace:
        """Stream one completion and return its trace.

        `leave_after`: disconnect after this many events. `into`: the trace to fill, readable while it grows.
        """
        connection = self._free.pop() if self._free else LeanHTTPConnection(self._url, self._key)
        trace = into or RequestTrace(time.perf_counter())
        try:
            async with aclosing(connection.stream(self._path, self._body(prompt, tokens))) as parts:  # type: ignore[type-var]
                async for event in events(parts):
                    self._record_event(event, trace)
                    if leave_after is not None and len(trace.marks) >= leave_after:
                        trace.abandoned = True
                        return trace
            trace.tokens = trace.tokens or len(trace.marks)
        except UnexpectedHTTPStatus as e:
            trace.error = str(e)
        trace.ended = time.perf_counter()
        self._free.append(connection)
        return trace

    async def check(self) -> None:
        """Raise EmberlineError if no server answers, or if its list of models does not contain ours."""
        connection = LeanHTTPConnection(self._url, self._key)
        try:
            listed = msgspec.json.decode(await connection.fetch(f"{urlsplit(self._url).path}/models"))
            names = [str(model["id"]) for model in listed["data"]]
        except ServerUnreachable as e:
            hint = "start one with `emberline serve`, or name another with --url"
            raise EngineUnavailable(f"no server answers at {self._url} ({e})", hint=hint) from e
        except (UnexpectedHTTPStatus, msgspec.DecodeError, LookupError, TypeError):
            return  # the server does not list its models
        finally:
            connection.close()
        if self._model not in names and "/" not in self._model:  # PROVIDER/MODEL of a gateway may be unlisted
            hint = f"give --model, one of {', '.join(names)}"
            raise ModelNotFound(f"{self._url} serves no model {self._model!r}", hint=hint)

    def close(self) -> None:
        while self._free:
            self._free.pop().close()

    def _body(self, prompt: list[int], tokens: int) -> bytes:
        body: dict[str, Any] = {"model": self._model, "max_tokens": tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        text = " ".join(str(token) for token in prompt[: max(1, len(prompt) // 3)])  # a number is about three tokens
        if self._chat:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text if self._plain else prompt
        if not self._plain:
            body["ignore_eos"] = True
        return msgspec.json.encode(body)

    def _record_event(self, event: dict[str, Any], trace: RequestTrace) -> None:
        if "error" in event:
            raise UnexpectedHTTPStatus(str(event["error"])[:300])
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
                trace.marks.append(time.perf_counter())
        if usage := event.get("usage"):
            trace.prompt_tokens = usage["prompt_tokens"]
            trace.tokens = usage["completion_tokens"]
