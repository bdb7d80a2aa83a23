"""Requests and streams for tests of the gateway's layers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from emberline.gateway.core.identity import ANONYMOUS, Identity
from emberline.gateway.core.options import RequestOptions
from emberline.gateway.core.request import Dialect, GatewayReply, GatewayRequest, RequestStep
from emberline.gateway.core.settings import GatewaySettings


def call(
    body: Mapping[str, Any] | bytes = b"{}",
    *,
    headers: Mapping[str, str] | None = None,
    identity: Identity = ANONYMOUS,
    settings: Mapping[str, Any] | GatewaySettings | None = None,
    dialect: Dialect = "openai-chat",
    provider: str = "openai",
    model: str = "gpt-4o-mini",
    max_output: int | None = None,
    answers: int = 1,
    stream: bool = False,
    endpoint: str = "chat/completions",
    deadline: float = 600.0,
    began: float = 0.0,
    steps: tuple[RequestStep, ...] = (),
) -> GatewayRequest:
    read = settings if isinstance(settings, GatewaySettings) else GatewaySettings.parse(settings or {})
    return GatewayRequest(
        id="id",
        account=read.account,
        gateway=read.gateway,
        provider=provider,
        endpoint=endpoint,
        dialect=dialect,
        method="POST",
        headers=dict(headers or {}),
        query="",
        body=body if isinstance(body, bytes) else json.dumps(body).encode(),
        model=model,
        stream=stream,
        max_output=max_output,
        choice_count=answers,
        options=RequestOptions.from_headers(headers or {}),
        identity=identity,
        settings=read,
        started_at=began,
        deadline=deadline,
        steps=steps,
    )


class Pieces:
    """A stream of given chunks that records how it ended."""

    def __init__(self, *chunks: bytes, reply: GatewayReply | None = None, error: Exception | None = None) -> None:
        self._chunks = list(chunks)
        self._error = error
        self.reply = reply
        self.closed = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._chunks:
            return self._chunks.pop(0)
        if self._error is not None:
            if self.reply is not None:
                self.reply.ended = "cut"
            raise self._error
        if self.reply is not None and not self.reply.ended:
            self.reply.ended = "complete"
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed = True
        if self.reply is not None and not self.reply.ended:
            self.reply.ended = "left"
