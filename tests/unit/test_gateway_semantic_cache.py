"""The semantic cache: which calls may share a reply, which never do, and shadow mode."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from gateway_requests import Pieces, call

from emberline.core.clock import ManualClock
from emberline.gateway.cache.entry import CacheEntry
from emberline.gateway.cache.factory import semantic_cache_factory
from emberline.gateway.cache.memory import MemoryCache
from emberline.gateway.cache.question import MAX_QUESTION_CHARS, UserQuestion
from emberline.gateway.cache.question_index import QuestionIndex, cosine_similarity, normalize_vector
from emberline.gateway.cache.semantic import SemanticCache, extract_reply_text
from emberline.gateway.core.errors import UpstreamFailed
from emberline.gateway.core.identity import Identity
from emberline.gateway.core.request import GatewayReply, GatewayRequest
from emberline.gateway.layers.caching import CacheLayer
from emberline.gateway.upstream.provider_request import ProviderRequest

WORDS = ["capital", "france", "germany", "paris", "berlin", "weather", "tell", "me", "what", "is", "the", "of", "not"]


class WordCountEmbedder:
    """An embedder that counts words, so that the order of words does not matter."""

    def __init__(self) -> None:
        self.calls = 0
        self.down = False

    async def embed(self, texts: list[str]) -> list[list[float]] | None:
        self.calls += 1
        await asyncio.sleep(0)
        if self.down:
            return None
        words = [text.lower().replace("?", "").split() for text in texts]
        return [[float(line.count(word)) for word in WORDS] + [0.01] for line in words]


def settings(mode: str = "on", **more: Any) -> dict[str, Any]:
    return {"cache_ttl": 60, "semantic": {"mode": mode, "threshold": 0.9}, **more}


def body(text: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": text}], **more}


class SemanticBench:
    def __init__(self) -> None:
        self.clock, self.embedder, self.sent = ManualClock(), WordCountEmbedder(), 0
        self.semantic = SemanticCache(self.embedder, self.clock)
        self.handler = CacheLayer(MemoryCache(self.clock), self.clock, lambda: self.semantic).wrap(self._inner)
        self.answers: list[str] = []

    async def _inner(self, call: GatewayRequest) -> GatewayReply:
        self.sent += 1
        text = self.answers.pop(0) if self.answers else f"answer {self.sent}"
        data = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        reply = GatewayReply(200, {"content-type": "application/json"}, data)
        if call.stream:
            reply.body = Pieces(b"data: " + data + b"\n\n", reply=reply)
        return reply

    async def ask(self, request_body: dict[str, Any], **about: Any) -> GatewayReply:
        reply = await self.handler(call(request_body, **{"settings": settings(), **about}))
        if not isinstance(reply.body, bytes):
            async for _ in reply.body:
                pass
        await reply.close()
        return reply


FIRST, OTHER = "what is the capital of france", "what is the weather"


def test_similar_question_gets_the_cached_reply() -> None:
    async def run() -> None:
        bench = SemanticBench()
        first = await bench.ask(body(FIRST))
        bench.clock.advance(50)
        again = await bench.ask(body("The capital of France is what?"))
        assert again.cached and again.body == first.body and bench.sent == 1
        assert again.headers["x-emberline-cache"].startswith("semantic; similarity=1.0000")
        assert not (await bench.ask(body(OTHER))).cached
        # it is now stored under its own key: nothing is embedded for it
        calls = bench.embedder.calls
        assert (await bench.ask(body("The capital of France is what?"))).cached and bench.embedder.calls == calls
        # and it expires with the entry that it is a copy of
        bench.clock.advance(11)
        assert not (await bench.ask(body("The capital of France is what?"))).cached

    asyncio.run(run())


def test_similar_question_gets_the_cached_stream() -> None:
    async def run() -> None:
        bench = SemanticBench()
        await bench.ask(body(FIRST, stream=True), stream=True)
        again = await bench.ask(body("The capital of France is what?", stream=True), stream=True)
        assert again.cached and not isinstance(again.body, bytes) and again.ended == "complete"

    asyncio.run(run())


ALICE = Identity("k1", "alice", "virtual", user="alice")
BOB = Identity("k2", "bob", "virtual", user="bob")
ALIKE = "The capital of France is what?"


@pytest.mark.parametrize(
    ("request_body", "about"),
    [
        (body(ALIKE, temperature=1), {}),
        (body(ALIKE, tools=[{"type": "function", "function": {"name": "f"}}]), {}),
        ({"model": "m", "messages": [{"role": "system", "content": "t"}, {"role": "user", "content": ALIKE}]}, {}),
        ({"model": "m", "messages": [{"role": "user", "content": ALIKE}]}, {}),
        (
            {"model": "m", "messages": [*body("earlier")["messages"], *body(ALIKE)["messages"][1:]]},
            {},
        ),
        (body(ALIKE), {"model": "n"}),
        (body(ALIKE), {"provider": "groq"}),
        (body(ALIKE), {"settings": settings(gateway="other")}),
        (body(ALIKE), {"settings": settings(account="other")}),
        (body(ALIKE), {"settings": settings("off")}),
        (body(ALIKE), {"headers": {"authorization": "Bearer another provider's key"}}),
        (body(ALIKE + " not"), {}),
        (body(ALIKE + " 2"), {}),
        (body([{"type": "text", "text": ALIKE}, {"type": "image_url", "image_url": {"url": "x"}}]), {}),
        (body([{"type": "text", "text": ALIKE, "cache_control": {"type": "ephemeral"}}]), {}),
    ],
)
def test_calls_that_differ_elsewhere_never_share(request_body: dict[str, Any], about: dict[str, Any]) -> None:
    async def run() -> None:
        bench = SemanticBench()
        await bench.ask(body(FIRST))
        assert not (await bench.ask(request_body, **about)).cached and bench.sent == 2

    asyncio.run(run())


@pytest.mark.parametrize("scope", ["key", "user"])
def test_tenants_do_not_share(scope: str) -> None:
    async def run() -> None:
        bench = SemanticBench()
        await bench.ask(body(FIRST), identity=ALICE, settings=settings(cache_scope=scope))
        assert not (await bench.ask(body(ALIKE), identity=BOB, settings=settings(cache_scope=scope))).cached
        assert (await bench.ask(body(ALIKE), identity=ALICE, settings=settings(cache_scope=scope))).cached

    asyncio.run(run())


def test_shadow_mode_serves_nothing_and_counts() -> None:
    async def run() -> None:
        bench = SemanticBench()
        bench.answers = ["paris", "paris", "berlin berlin berlin"]
        for text in (FIRST, ALIKE, "what france is the capital of"):
            reply = await bench.ask(body(text), settings=settings("shadow"))
            assert not reply.cached
        stats = bench.semantic.stats
        assert bench.sent == 3 and (stats.similar, stats.served, stats.compared, stats.disagreed) == (2, 0, 2, 1)

    asyncio.run(run())


def test_embedder_failure_does_not_fail_calls() -> None:
    async def run() -> None:
        bench = SemanticBench()
        bench.embedder.down = True
        await bench.ask(body(FIRST))
        await bench.ask(body(ALIKE))
        assert bench.sent == 2 and (await bench.ask(body(FIRST))).cached

    asyncio.run(run())


def test_equal_questions_in_flight_are_sent_once() -> None:
    async def run() -> None:
        bench = SemanticBench()
        replies = await asyncio.gather(*(bench.ask(body(FIRST)) for _ in range(10)))
        assert bench.sent == 1 and bench.embedder.calls == 1 and sum(reply.cached for reply in replies) == 9

    asyncio.run(run())


# Questions


@pytest.mark.parametrize(
    ("dialect", "request_body"),
    [
        ("openai-chat", {"messages": [{"role": "user", "content": "hi"}]}),
        ("openai-chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
        ("anthropic", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "system": "s"}),
        ("openai-responses", {"input": "hi"}),
        ("openai-responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]}),
        ("gemini", {"contents": [{"parts": [{"text": "hi"}]}]}),
        (
            "gemini",
            {"contents": [{"role": "model", "parts": [{"text": "a"}]}, {"role": "user", "parts": [{"text": "hi"}]}]},
        ),
    ],
)
def test_question_is_the_last_turn_in_every_dialect(dialect: Any, request_body: dict[str, Any]) -> None:
    question = UserQuestion.from_call(call(request_body, dialect=dialect))
    assert question is not None and question.text == "hi"


@pytest.mark.parametrize(
    "request_body",
    [
        {},
        [],
        {"messages": []},
        {"messages": "hi there"},
        {"messages": [{"role": "assistant", "content": "hi"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": "x" * (MAX_QUESTION_CHARS + 1)}]},
        {"messages": ["hi"]},
    ],
)
def test_calls_without_a_question(request_body: Any) -> None:
    question = UserQuestion.from_call(call(json.dumps(request_body).encode()))
    assert question is None or request_body == {"messages": "hi there"}
    assert UserQuestion.from_call(call(json.dumps(request_body).encode(), dialect="raw")) is None


# Vectors


def test_question_index_is_bounded_and_exact() -> None:
    index, rng = QuestionIndex(max_questions=50, max_partition_questions=20), np.random.default_rng(0)
    questions = [(UserQuestion(f"{i}", f"p{i % 4}"), normalize_vector(list(rng.normal(size=8)))) for i in range(200)]
    for i, (question, vector) in enumerate(questions):
        assert vector is not None
        index.add_question(UserQuestion("", question.partition), vector, str(i), 100.0)
        assert index.size <= 50
    question, vector = questions[-1]
    assert vector is not None
    found = index.find_similar(UserQuestion("", question.partition), vector, 0.999, 0.0)
    assert found is not None and found.key == "199"
    assert index.find_similar(UserQuestion("", question.partition), vector, 0.999, 100.0) is None  # expired
    assert index.find_similar(UserQuestion("", "p9"), vector, 0.5, 0.0) is None
    assert (
        normalize_vector([0.0, 0.0]) is None
        and normalize_vector([float("nan")]) is None
        and cosine_similarity([1.0], [1.0, 2.0]) == 0.0
    )


def test_reply_text() -> None:
    def entry(*chunks: bytes, stream: bool = False) -> CacheEntry:
        return CacheEntry(200, {}, "", "", None, stream, list(chunks))

    assert (
        extract_reply_text(entry(b'{"content": [{"type": "text", "text": "hello"}], "role": "assistant"}')) == "hello"
    )
    events = entry(
        b'event: x\ndata: {"delta": {"text": "he"}}\n\n', b'data: {"delta": "llo"}\n\ndata: [DONE]\n\n', stream=True
    )
    assert extract_reply_text(events) == "hello"
    assert extract_reply_text(entry(b"\xff")) == ""


def test_embedder_sends_the_key_of_the_engine() -> None:
    sent: list[ProviderRequest] = []

    class RecordingUpstream:
        async def send(self, request: ProviderRequest, timeout_s: float) -> Any:
            sent.append(request)
            raise UpstreamFailed("recorded")

    make_cache = semantic_cache_factory(RecordingUpstream(), "http://engine", "m", ManualClock(), key="k")  # type: ignore[arg-type]
    assert asyncio.run(make_cache()._embedder.embed(["text"])) is None
    assert [(each.url, each.headers["authorization"]) for each in sent] == [("http://engine/v1/embeddings", "Bearer k")]
