"""CPU work of large requests beside the event loop: where it runs, what ends it, and what comes back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from gateway_calls import call

from emberline.api.parse import decode
from emberline.core.clock import ManualClock
from emberline.core.errors import EngineUnavailable, InvalidRequest, WorkTooLarge
from emberline.core.offload import LARGE, Child, offload
from emberline.gateway.cache.key import cache_key
from emberline.gateway.call import Call, Reply
from emberline.gateway.guardrails.inspection import LARGE as INSPECTED_LARGE
from emberline.gateway.layers.guarded import Guarded
from emberline.gateway.providers.registry import Registry
from emberline.gateway.providers.wire import wired, wired_apart
from emberline.gateway.settings import Settings
from emberline.gateway.survey import survey


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child("test", cpu_seconds=0.2)
    yield made
    made.close()


def test_it_runs_in_another_process(child: Child) -> None:
    assert asyncio.run(child.run(os.getpid)) != os.getpid()


def test_the_loop_has_turns_while_it_runs(child: Child) -> None:
    """Counted, not timed: a loop that waits inside the call would have none."""

    async def run() -> int:
        turns, work = 0, asyncio.ensure_future(child.run(os.getpid))
        while not work.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(run()) > 2


def test_what_takes_too_much_processor_time_is_ended_and_the_next_call_is_answered(child: Child) -> None:
    async def run() -> int:
        with pytest.raises(WorkTooLarge, match=r"more than 0\.2 s of processor time"):
            await child.run(sum, range(10**12))
        return await child.run(os.getpid)

    assert asyncio.run(run()) > 0


def test_a_child_that_is_killed_says_nothing_about_the_request(child: Child) -> None:
    async def run() -> int:
        with pytest.raises(EngineUnavailable):
            await child.run(signal.raise_signal, signal.SIGKILL)
        return await child.run(os.getpid)

    assert asyncio.run(run()) > 0


def test_errors_come_back_as_they_are(child: Child) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON") as caught:
        asyncio.run(child.run(decode, b"{", dict))
    assert caught.value.status == 400 and caught.value.code == "invalid_value"
    with pytest.raises(RecursionError):
        asyncio.run(child.run(json.loads, "[" * 100_000))


# -- who uses it -------------------------------------------------------------------------------------------------------


def chat(content: str, model: str = "gpt-4o-mini") -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}]}).encode()


def made_calls() -> int:
    return offload.large.calls + offload.huge.calls


def guarded(body: bytes, answer: bytes = b"{}") -> tuple[Call, bytes]:
    sent: list[Call] = []

    async def inner(asked: Call) -> Reply:
        sent.append(asked)
        return Reply(200, {}, answer, ended="complete")

    rule = {"name": "r", "find": ["payment_card", "email"], "action": "redact"}
    asked = call(body, settings={"guardrails": {"patterns": [rule]}})
    reply = asyncio.run(Guarded(inner, ManualClock()).layer(inner)(asked))
    assert isinstance(reply.body, bytes)
    return sent[0], reply.body


def test_patterns_of_a_large_prompt_and_reply_run_beside_the_loop() -> None:
    text, before = "word " * (INSPECTED_LARGE // 4), made_calls()
    sent, reply = guarded(chat(f"{text} 4111 1111 1111 1111"), chat(f"{text} ada@example.com"))
    assert made_calls() == before + 2 + (len(sent.body) >= LARGE)
    assert b"[payment_card]" in sent.body and b"[email]" in reply
    guarded(chat("small"))
    assert made_calls() == before + 2 + (len(sent.body) >= LARGE), "small bodies stay on the loop"


def test_a_redacted_large_body_is_surveyed_again() -> None:
    sent, _ = guarded(chat("word " * (LARGE // 4) + "4111 1111 1111 1111"))
    assert sent.surveyed == survey(sent.body) and sent.seen is not None and sent.seen.model == "gpt-4o-mini"


def test_a_survey_holds_what_the_layers_ask_for() -> None:
    found = survey(chat("word " * 100))
    assert found.seen is not None and found.seen.model == "gpt-4o-mini" and found.tokens > 100
    respaced = json.dumps(json.loads(chat("word " * 100)), indent=1).encode()
    assert survey(respaced).canonical == found.canonical != survey(chat("other")).canonical
    broken = survey(b"[" + b"1," * 1000)
    assert broken.seen is None and "not a JSON object" in broken.error
    large: dict[str, Any] = {"model": ["x"] * 10_000, "stream_options": {"include_usage": True, "x": [1] * 1000}}
    seen = survey(json.dumps(large).encode()).seen
    assert seen is not None and seen.model is None and seen.stream_options == {"include_usage": True, "x": None}


def test_the_cache_key_of_a_surveyed_call_needs_no_decoding() -> None:
    asked = call(chat("hi"))
    asked.surveyed = survey(asked.body)
    other = call(chat("hi there"))
    other.surveyed = survey(other.body)
    same = call(b"not looked at")
    same.surveyed = asked.surveyed
    assert cache_key(asked) == cache_key(same) != cache_key(other)


@pytest.mark.parametrize("provider", ["openai", "anthropic", "google-ai-studio", "groq", "cohere", "aws-bedrock"])
def test_a_large_body_is_prepared_for_its_provider_beside_the_loop(provider: str) -> None:
    """The same request, wherever it was made."""
    asked = call(chat("word " * (LARGE // 4)), provider=provider, settings=Settings())
    asked.plain = True
    key = json.dumps({"accessKeyId": "a", "secretAccessKey": "b", "region": "us-east-1"}) if "aws" in provider else "k"
    found, before = Registry().find(provider, asked.settings), made_calls()
    here = wired(asked.moved(notes={}), found, key, 100, 7)
    there = asyncio.run(wired_apart(asked.moved(notes={}), found, key, 100, 7))
    assert made_calls() == before + 1
    assert (there.out.body, there.out.url, there.dialect, there.client) == (
        here.out.body,
        here.out.url,
        here.dialect,
        here.client,
    )
