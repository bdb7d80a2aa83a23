"""CPU work of large requests in child processes: where it runs, what ends it, and which errors are passed on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from gateway_requests import call

from emberline.api.parse import decode
from emberline.core.clock import ManualClock
from emberline.core.errors import EngineUnavailable, InvalidRequest, WorkTooLarge
from emberline.core.fair_threads import current_client
from emberline.core.offload import LARGE_INPUT_BYTES, OffloadProcess, offload
from emberline.gateway.cache.key import cache_key
from emberline.gateway.core.body_summary import summarize_body
from emberline.gateway.core.request import GatewayReply, GatewayRequest
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.guardrails.inspection import OFFLOAD_MIN_BYTES as INSPECTED_LARGE
from emberline.gateway.layers.guardrail_checks import GuardrailLayer
from emberline.gateway.providers.provider_call import build_provider_call, build_provider_call_offloaded
from emberline.gateway.providers.registry import ProviderRegistry


@pytest.fixture
def child() -> Iterator[OffloadProcess]:
    made = OffloadProcess("test", cpu_seconds=0.2)
    yield made
    made.close()


def test_work_runs_in_another_process(child: OffloadProcess) -> None:
    assert asyncio.run(child.run(os.getpid)) != os.getpid()


def test_event_loop_runs_during_the_work(child: OffloadProcess) -> None:
    """Loop steps are counted, not timed; a loop that blocks in the call would have none."""

    async def run() -> int:
        loop_steps, work = 0, asyncio.ensure_future(child.run(os.getpid))
        while not work.done():
            loop_steps += 1
            await asyncio.sleep(0)
        return loop_steps

    assert asyncio.run(run()) > 2


def test_work_over_its_cpu_limit_is_ended(child: OffloadProcess) -> None:
    async def run() -> int:
        with pytest.raises(WorkTooLarge, match=r"more than the limit of 0\.2 s of CPU time"):
            await child.run(sum, range(10**12))
        return await child.run(os.getpid)

    assert asyncio.run(run()) > 0


def test_killed_child_is_not_the_fault_of_the_request(child: OffloadProcess) -> None:
    async def run() -> int:
        with pytest.raises(EngineUnavailable):
            await child.run(signal.raise_signal, signal.SIGKILL)
        return await child.run(os.getpid)

    assert asyncio.run(run()) > 0


def test_errors_are_passed_on_unchanged(child: OffloadProcess) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON") as caught:
        asyncio.run(child.run(decode, b"{", dict))
    assert caught.value.status == 400 and caught.value.code == "invalid_value"
    with pytest.raises(RecursionError):
        asyncio.run(child.run(json.loads, "[" * 100_000))


def test_work_of_another_client_waits_for_one_call_only() -> None:
    order: list[str] = []

    async def work(process: OffloadProcess, client: bytes, name: str) -> None:
        current_client.set(client)
        await process.run(int, "1")
        order.append(name)

    async def run() -> None:
        process = OffloadProcess("test")
        names = [(b"a", f"a{i}") for i in range(5)] + [(b"b", "b")]
        await asyncio.gather(*(work(process, *each) for each in names))
        process.close()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await process.run(int, "1")

    asyncio.run(asyncio.wait_for(run(), 60))
    assert order.index("b") <= 2


# -- users of the children ---------------------------------------------------------------------------------------------


def chat(content: str, model: str = "gpt-4o-mini") -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}]}).encode()


def child_calls() -> int:
    return offload.large.calls + offload.huge.calls


def send_guarded(body: bytes, answer: bytes = b"{}") -> tuple[GatewayRequest, bytes]:
    sent: list[GatewayRequest] = []

    async def inner(request: GatewayRequest) -> GatewayReply:
        sent.append(request)
        return GatewayReply(200, {}, answer, ended="complete")

    rule = {"name": "r", "find": ["payment_card", "email"], "action": "redact"}
    request = call(body, settings={"guardrails": {"patterns": [rule]}})
    reply = asyncio.run(GuardrailLayer(inner, ManualClock()).wrap(inner)(request))
    assert isinstance(reply.body, bytes)
    return sent[0], reply.body


def test_guardrails_of_large_bodies_run_in_a_child() -> None:
    text, before = "word " * (INSPECTED_LARGE // 4), child_calls()
    sent, reply = send_guarded(chat(f"{text} 4111 1111 1111 1111"), chat(f"{text} ada@example.com"))
    assert child_calls() == before + 2 + (len(sent.body) >= LARGE_INPUT_BYTES)
    assert b"[payment_card]" in sent.body and b"[email]" in reply
    send_guarded(chat("small"))
    assert child_calls() == before + 2 + (len(sent.body) >= LARGE_INPUT_BYTES), (
        "small bodies are handled in the event loop"
    )


def test_redacted_large_body_is_summarized_again() -> None:
    sent, _ = send_guarded(chat("word " * (LARGE_INPUT_BYTES // 4) + "4111 1111 1111 1111"))
    assert (
        sent.body_summary == summarize_body(sent.body)
        and sent.body_fields is not None
        and sent.body_fields.model == "gpt-4o-mini"
    )


def test_body_summary_has_what_the_layers_need() -> None:
    found = summarize_body(chat("word " * 100))
    assert found.body_fields is not None and found.body_fields.model == "gpt-4o-mini" and found.input_tokens > 100
    respaced = json.dumps(json.loads(chat("word " * 100)), indent=1).encode()
    assert (
        summarize_body(respaced).canonical_digest
        == found.canonical_digest
        != summarize_body(chat("other")).canonical_digest
    )
    broken = summarize_body(b"[" + b"1," * 1000)
    assert broken.body_fields is None and "must be a JSON object" in broken.error
    large: dict[str, Any] = {"model": ["x"] * 10_000, "stream_options": {"include_usage": True, "x": [1] * 1000}}
    seen = summarize_body(json.dumps(large).encode()).body_fields
    assert seen is not None and seen.model is None and seen.stream_options == {"include_usage": True, "x": None}


def test_cache_key_of_a_summarized_body_needs_no_decoding() -> None:
    request = call(chat("hi"))
    request.body_summary = summarize_body(request.body)
    other = call(chat("hi there"))
    other.body_summary = summarize_body(other.body)
    same = call(b"not looked at")
    same.body_summary = request.body_summary
    assert cache_key(request) == cache_key(same) != cache_key(other)


@pytest.mark.parametrize("provider", ["openai", "anthropic", "google-ai-studio", "groq", "cohere", "aws-bedrock"])
def test_large_body_is_translated_in_a_child(provider: str) -> None:
    """The request is the same wherever it was translated."""
    request = call(chat("word " * (LARGE_INPUT_BYTES // 4)), provider=provider, settings=GatewaySettings())
    request.is_dialect_endpoint = True
    key = json.dumps({"accessKeyId": "a", "secretAccessKey": "b", "region": "us-east-1"}) if "aws" in provider else "k"
    found, before = ProviderRegistry().find_provider(provider, request.settings), child_calls()
    local = build_provider_call(request.with_changes(reply_headers={}), found, key, 100, 7)
    remote = asyncio.run(build_provider_call_offloaded(request.with_changes(reply_headers={}), found, key, 100, 7))
    assert child_calls() == before + 1
    assert (remote.request.body, remote.request.url, remote.dialect, remote.client_dialect) == (
        local.request.body,
        local.request.url,
        local.dialect,
        local.client_dialect,
    )
