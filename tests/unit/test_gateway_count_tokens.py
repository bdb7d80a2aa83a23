"""count_tokens needs Anthropic's protocol: for other providers it is an error and nothing is sent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from emberline.core.clock import ManualClock
from emberline.gateway.core.request import GatewayReply, GatewayRequest
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.gateway import Gateway, InboundRequest
from emberline.gateway.providers.registry import ProviderRegistry


class Known:
    async def get_settings(self, account: str, gateway: str) -> GatewaySettings:
        return GatewaySettings()

    async def identify(self, token: str) -> None:
        return None


@pytest.mark.parametrize(
    ("model", "status"),
    [("openai/gpt-5", 400), ("google-ai-studio/gemini-2.5-pro", 400), ("anthropic/claude-sonnet-4-5", 200), ("m", 200)],
)
def test_count_tokens_needs_anthropic_protocol(model: str, status: int) -> None:
    sent: list[GatewayRequest] = []

    async def handler(call: GatewayRequest) -> GatewayReply:
        sent.append(call)
        return GatewayReply(200, {}, b"{}")

    known: Any = Known()
    gateway = Gateway(handler, handler, ProviderRegistry(), known, known, ManualClock(), ManualClock())
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]}).encode()
    reply = asyncio.run(gateway.answer(InboundRequest("POST", "/v1/messages/count_tokens", "", {}, body)))
    assert reply.status == status and len(sent) == (status == 200)
    if status == 400:
        assert isinstance(reply.body, bytes) and model in reply.body.decode() and b"count_tokens" in reply.body
