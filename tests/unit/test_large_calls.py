"""Large request bodies are parsed in a child process, which rejects those that fit no context."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from emberline.api.call import ChatCall, CompletionCall
from emberline.core.errors import ContextLengthExceeded, InvalidRequest, WorkTooLarge
from emberline.core.offload import offload
from emberline.router.request_summary import RequestSummary
from emberline.worker.protocols import MAX_MESSAGES, parse_large_body

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def parse_in_child(path: str, body: dict[str, Any], context: int = 1000) -> ChatCall | CompletionCall:
    return parse_large_body(path, json.dumps({"model": "m", **body}).encode(), {"m": context})


def test_large_call_parses_the_same_in_child_process() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 40_000}]}).encode()
    here = parse_large_body(CHAT, body, {"m": 100_000})
    assert asyncio.run(offload.run(len(body), parse_large_body, CHAT, body, {"m": 100_000})) == here
    assert asyncio.run(offload.run(len(body), RequestSummary.parse, body, "s")) == RequestSummary.parse(body, "s")


def test_oversized_call_is_rejected_in_child_process() -> None:
    with pytest.raises(ContextLengthExceeded, match="messages has 128005 characters"):
        parse_in_child(CHAT, {"messages": [{"role": "user", "content": "x" * 128_001}]})
    with pytest.raises(ContextLengthExceeded, match="prompt has 1001 tokens"):
        parse_in_child(COMPLETIONS, {"prompt": [1] * 1001})
    with pytest.raises(WorkTooLarge, match="the limit is 20000"):
        parse_in_child(CHAT, {"messages": [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)}, 10**6)
    assert parse_in_child(COMPLETIONS, {"prompt": [1] * 1000}) is not None
    with pytest.raises(InvalidRequest):
        parse_in_child(CHAT, {"messages": [[]]})
