"""Large bodies at the engine's server: parsed elsewhere, refused there when no context takes them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from emberline.api.call import ChatCall, CompletionCall
from emberline.core.errors import ContextLengthExceeded, InvalidRequest, WorkTooLarge
from emberline.core.offload import offload
from emberline.router.request_summary import RequestSummary
from emberline.server.worker.protocols import MAX_MESSAGES, parse_large

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def parsed(path: str, body: dict[str, Any], context: int = 1000) -> ChatCall | CompletionCall:
    return parse_large(path, json.dumps({"model": "m", **body}).encode(), {"m": context})


def test_a_large_call_is_the_same_wherever_it_is_parsed() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 40_000}]}).encode()
    here = parse_large(CHAT, body, {"m": 100_000})
    assert asyncio.run(offload.run(len(body), parse_large, CHAT, body, {"m": 100_000})) == here
    assert asyncio.run(offload.run(len(body), RequestSummary.parse, body, "s")) == RequestSummary.parse(body, "s")


def test_what_no_context_takes_is_refused_before_it_comes_back() -> None:
    with pytest.raises(ContextLengthExceeded, match="messages has 128005 characters"):
        parsed(CHAT, {"messages": [{"role": "user", "content": "x" * 128_001}]})
    with pytest.raises(ContextLengthExceeded, match="prompt has 1001 tokens"):
        parsed(COMPLETIONS, {"prompt": [1] * 1001})
    with pytest.raises(WorkTooLarge, match="the limit is 20000"):
        parsed(CHAT, {"messages": [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)}, 10**6)
    assert parsed(COMPLETIONS, {"prompt": [1] * 1000}) is not None
    with pytest.raises(InvalidRequest):
        parsed(CHAT, {"messages": [[]]})
