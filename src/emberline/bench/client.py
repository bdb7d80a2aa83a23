"""CompletionClient: sends completion requests to any OpenAI-compatible URL and records when each event arrives."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import msgspec

from emberline.bench.connection import HTTPRequestFailed, MinimalHTTPConnection, ServerUnreachable, parse_sse_events
from emberline.core.errors import EngineUnavailable, ModelNotFound
from emberline.core.events import Timing


@dataclass(slots=True)
class RequestTrace:
    """Measurements of one request, taken by the client.

    They are the time at which the request was sent, the time at which each event with new text arrived, and the token
    counts that the server reported.
    """

    sent: float
    event_times: list[float] = field(default_factory=list)
    ended: float | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None
    abandoned: bool = False

    @property
    def timing(self) -> Timing:
        first = self.event_times[0] if self.event_times else None
        return Timing(self.sent, first_token=first, finished=self.ended)

    @property
    def inter_token_seconds(self) -> list[float]:
        """Return the inter-token latencies that a client sees, in seconds."""
        return [b - a for a, b in pairwise(self.event_times)]


class CompletionClient:
    def __init__(
        self,
        url: str,
        model: str,
        *,
        chat: bool = False,
        only_standard_fields: bool = False,
        api_key: str | None = None,
    ) -> None:
        """Create a client for one model at one URL.

        With `only_standard_fields`, requests contain only fields that every OpenAI-compatible server accepts: the
        prompt is sent as text instead of token ids, and `ignore_eos` is left out.
        """
        self._url, self._key = url.rstrip("/"), api_key
        self._model, self._chat, self._plain = model, chat, only_standard_fields
        base = urlsplit(self._url).path
        self._path = base + ("/chat/completions" if chat else "/completions")
        self._free: list[MinimalHTTPConnection] = []

    async def complete(
        self,
        prompt: list[int] | str,
        max_tokens: int,
        disconnect_after_events: int | None = None,
        *,
        trace_to_fill: RequestTrace | None = None,
    ) -> RequestTrace:
        """Stream one completion and return its trace. A completion of a text prompt may have fewer than `max_tokens`.

        With `disconnect_after_events`, the client closes the connection after this many events with text.
        `trace_to_fill` is a trace that the caller can read while the stream is running; by default a new one is
        created.
        """
        connection = self._free.pop() if self._free else MinimalHTTPConnection(self._url, self._key)
        trace = trace_to_fill or RequestTrace(time.perf_counter())
        try:
            async with aclosing(connection.stream_reply(self._path, self._encode_request(prompt, max_tokens))) as parts:  # type: ignore[type-var]
                async for event in parse_sse_events(parts):
                    self._record_event(event, trace)
                    if disconnect_after_events is not None and len(trace.event_times) >= disconnect_after_events:
                        trace.abandoned = True
                        return trace
            trace.tokens = trace.tokens or len(trace.event_times)
        except HTTPRequestFailed as e:
            trace.error = str(e)
        trace.ended = time.perf_counter()
        self._free.append(connection)
        return trace

    async def check_model_is_served(self) -> None:
        """Check that the server answers and lists the model of this client.

        Raises EmberlineError if it does not. A server that has no list of models passes.
        """
        connection = MinimalHTTPConnection(self._url, self._key)
        try:
            listed = msgspec.json.decode(await connection.fetch(f"{urlsplit(self._url).path}/models"))
            names = [str(model["id"]) for model in listed["data"]]
        except ServerUnreachable as e:
            hint = "start a server with `emberline serve`, or give the URL of a running one with --url"
            raise EngineUnavailable(f"no server answers at {self._url}: {e}", hint=hint) from e
        except (HTTPRequestFailed, msgspec.DecodeError, LookupError, TypeError):
            return  # the server does not list its models
        finally:
            connection.close()
        if self._model not in names and "/" not in self._model:  # PROVIDER/MODEL of a gateway may be unlisted
            hint = f"choose one with --model: {', '.join(names)}"
            raise ModelNotFound(f"the server at {self._url} does not serve the model {self._model!r}", hint=hint)

    def close(self) -> None:
        while self._free:
            self._free.pop().close()

    def _encode_request(self, prompt: list[int] | str, max_tokens: int) -> bytes:
        body: dict[str, Any] = {"model": self._model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        is_text = isinstance(prompt, str)
        words = prompt[: max(1, len(prompt) // 3)]  # a number is about three tokens
        text = prompt if isinstance(prompt, str) else " ".join(str(token) for token in words)
        if self._chat:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text if self._plain or is_text else prompt
        if not self._plain and not is_text:
            body["ignore_eos"] = True
        return msgspec.json.encode(body)

    def _record_event(self, event: dict[str, Any], trace: RequestTrace) -> None:
        if "error" in event:
            raise HTTPRequestFailed(str(event["error"])[:300])
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
                trace.event_times.append(time.perf_counter())
        if usage := event.get("usage"):
            trace.prompt_tokens = usage["prompt_tokens"]
            trace.tokens = usage["completion_tokens"]
