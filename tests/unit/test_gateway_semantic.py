"""The semantic cache: what may share a reply by meaning and what never does, and the shadow that only counts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from gateway_calls import Pieces, call

from emberline.core.clock import ManualClock
from emberline.gateway.cache.entry import Entry
from emberline.gateway.cache.memory import MemoryCache
from emberline.gateway.cache.nearest import Nearest, cosine, unit
from emberline.gateway.cache.question import LONGEST, Question
from emberline.gateway.cache.semantic import Semantic, said
from emberline.gateway.call import Call, Reply
from emberline.gateway.keys.identity import Identity
from emberline.gateway.layers.cached import Cached

WORDS = ["capital", "france", "germany", "paris", "berlin", "weather", "tell", "me", "what", "is", "the", "of", "not"]


class Words:
    """An embedder that counts words: the same words in another order are the same."""

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


class Bench:
    def __init__(self) -> None:
        self.clock, self.words, self.sent = ManualClock(), Words(), 0
        self.semantic = Semantic(self.words, self.clock)
        self.handler = Cached(MemoryCache(self.clock), self.clock, lambda: self.semantic).layer(self._inner)
        self.answers: list[str] = []

    async def _inner(self, call: Call) -> Reply:
        self.sent += 1
        text = self.answers.pop(0) if self.answers else f"answer {self.sent}"
        data = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        reply = Reply(200, {"content-type": "application/json"}, data)
        if call.stream:
            reply.body = Pieces(b"data: " + data + b"\n\n", reply=reply)
        return reply

    async def ask(self, asked: dict[str, Any], **about: Any) -> Reply:
        reply = await self.handler(call(asked, **{"settings": settings(), **about}))
        if not isinstance(reply.body, bytes):
            async for _ in reply.body:
                pass
        await reply.close()
        return reply


FIRST, OTHER = "what is the capital of france", "what is the weather"


def test_the_same_meaning_gets_the_same_reply() -> None:
    async def go() -> None:
        bench = Bench()
        first = await bench.ask(body(FIRST))
        bench.clock.advance(50)
        again = await bench.ask(body("The capital of France is what?"))
        assert again.cached and again.body == first.body and bench.sent == 1
        assert again.headers["x-emberline-cache"].startswith("semantic; similarity=1.0000")
        assert not (await bench.ask(body(OTHER))).cached
        # now it is known by its own words: nothing is embedded for it
        calls = bench.words.calls
        assert (await bench.ask(body("The capital of France is what?"))).cached and bench.words.calls == calls
        # and it is not kept for longer than what it is a copy of
        bench.clock.advance(11)
        assert not (await bench.ask(body("The capital of France is what?"))).cached

    asyncio.run(go())


def test_streams_too() -> None:
    async def go() -> None:
        bench = Bench()
        await bench.ask(body(FIRST, stream=True), stream=True)
        again = await bench.ask(body("The capital of France is what?", stream=True), stream=True)
        assert again.cached and not isinstance(again.body, bytes) and again.ended == "complete"

    asyncio.run(go())


ADA = Identity("k1", "ada", "virtual", user="ada")
BOB = Identity("k2", "bob", "virtual", user="bob")
ALIKE = "The capital of France is what?"


@pytest.mark.parametrize(
    ("asked", "about"),
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
def test_what_is_not_all_the_same_is_never_shared(asked: dict[str, Any], about: dict[str, Any]) -> None:
    async def go() -> None:
        bench = Bench()
        await bench.ask(body(FIRST))
        assert not (await bench.ask(asked, **about)).cached and bench.sent == 2

    asyncio.run(go())


@pytest.mark.parametrize("scope", ["key", "user"])
def test_tenants_are_apart(scope: str) -> None:
    async def go() -> None:
        bench = Bench()
        await bench.ask(body(FIRST), identity=ADA, settings=settings(cache_scope=scope))
        assert not (await bench.ask(body(ALIKE), identity=BOB, settings=settings(cache_scope=scope))).cached
        assert (await bench.ask(body(ALIKE), identity=ADA, settings=settings(cache_scope=scope))).cached

    asyncio.run(go())


def test_the_shadow_answers_nothing_and_counts() -> None:
    async def go() -> None:
        bench = Bench()
        bench.answers = ["paris", "paris", "berlin berlin berlin"]
        for text in (FIRST, ALIKE, "what france is the capital of"):
            reply = await bench.ask(body(text), settings=settings("shadow"))
            assert not reply.cached
        stats = bench.semantic.stats
        assert bench.sent == 3 and (stats.near, stats.served, stats.compared, stats.disagreed) == (2, 0, 2, 1)

    asyncio.run(go())


def test_without_an_embedder_calls_go_on() -> None:
    async def go() -> None:
        bench = Bench()
        bench.words.down = True
        await bench.ask(body(FIRST))
        await bench.ask(body(ALIKE))
        assert bench.sent == 2 and (await bench.ask(body(FIRST))).cached

    asyncio.run(go())


def test_equal_questions_at_once_are_sent_once() -> None:
    async def go() -> None:
        bench = Bench()
        replies = await asyncio.gather(*(bench.ask(body(FIRST)) for _ in range(10)))
        assert bench.sent == 1 and bench.words.calls == 1 and sum(reply.cached for reply in replies) == 9

    asyncio.run(go())


# Questions


@pytest.mark.parametrize(
    ("dialect", "asked"),
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
def test_the_last_turn_of_every_dialect(dialect: Any, asked: dict[str, Any]) -> None:
    question = Question.of(call(asked, dialect=dialect))
    assert question is not None and question.text == "hi"


@pytest.mark.parametrize(
    "asked",
    [
        {},
        [],
        {"messages": []},
        {"messages": "hi there"},
        {"messages": [{"role": "assistant", "content": "hi"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": "x" * (LONGEST + 1)}]},
        {"messages": ["hi"]},
    ],
)
def test_no_question(asked: Any) -> None:
    made = Question.of(call(json.dumps(asked).encode()))
    assert made is None or asked == {"messages": "hi there"}
    assert Question.of(call(json.dumps(asked).encode(), dialect="raw")) is None


# Vectors


def test_nearest_is_bounded_and_exact() -> None:
    nearest, rng = Nearest(most=50, most_each=20), np.random.default_rng(0)
    made = [(Question(f"{i}", f"p{i % 4}"), unit(list(rng.normal(size=8)))) for i in range(200)]
    for i, (question, vector) in enumerate(made):
        assert vector is not None
        nearest.add(Question("", question.partition), vector, str(i), 100.0)
        assert nearest.size <= 50
    question, vector = made[-1]
    assert vector is not None
    found = nearest.find(Question("", question.partition), vector, 0.999, 0.0)
    assert found is not None and found.key == "199"
    assert nearest.find(Question("", question.partition), vector, 0.999, 100.0) is None  # expired
    assert nearest.find(Question("", "p9"), vector, 0.5, 0.0) is None
    assert unit([0.0, 0.0]) is None and unit([float("nan")]) is None and cosine([1.0], [1.0, 2.0]) == 0.0


def test_what_a_reply_said() -> None:
    def entry(*chunks: bytes, stream: bool = False) -> Entry:
        return Entry(200, {}, "", "", None, stream, list(chunks))

    assert said(entry(b'{"content": [{"type": "text", "text": "hello"}], "role": "assistant"}')) == "hello"
    events = entry(
        b'event: x\ndata: {"delta": {"text": "he"}}\n\n', b'data: {"delta": "llo"}\n\ndata: [DONE]\n\n', stream=True
    )
    assert said(events) == "hello"
    assert said(entry(b"\xff")) == ""
