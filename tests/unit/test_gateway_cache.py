"""The exact cache: which calls share a reply, what is stored and where, how streams are replayed, and single flight."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_requests import Pieces, call
from hypothesis import given
from hypothesis import strategies as st

from emberline.core.clock import ManualClock
from emberline.gateway.cache import sqlite as sqlite_cache
from emberline.gateway.cache.base import CacheStore
from emberline.gateway.cache.entry import CacheEntry
from emberline.gateway.cache.key import cache_key, canonicalize_body
from emberline.gateway.cache.memory import ENTRY_OVERHEAD_BYTES, MemoryCache
from emberline.gateway.cache.sqlite import SqliteCache
from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.core.identity import ANONYMOUS, Identity
from emberline.gateway.core.request import GatewayReply, GatewayRequest, RequestStep
from emberline.gateway.layers.caching import CacheLayer, cache_ttl_s
from emberline.gateway.providers.base import CREDENTIAL_HEADERS
from emberline.wire.usage import Usage

ON = {"cache_ttl": 60}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}
ALICE = Identity("k1", "alice's", "virtual", user="alice")
BOB = Identity("k2", "bob's", "virtual", user="bob")


# Keys


def test_equal_json_has_equal_keys() -> None:
    shuffled = b'{"temperature":0.5,  "messages":[{"content":"h\\u0069","role":"user"}],"model":"m"}'
    assert cache_key(call(BODY)) == cache_key(call(shuffled))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=15,
)


@given(JSON, st.booleans(), st.integers(0, 3))
def test_canonical_json_ignores_formatting(value: Any, ascii_: bool, indent: int) -> None:
    written = json.dumps(value, ensure_ascii=ascii_, indent=indent or None).encode("utf-8", "surrogatepass")
    compact = canonicalize_body(json.dumps(value).encode())
    if canonicalize_body(written).startswith(b"json:") and compact.startswith(b"json:"):
        assert canonicalize_body(written) == compact
    else:  # lone surrogate, or a quote in an escape
        assert canonicalize_body(written) == b"bytes:" + written or compact.startswith(b"bytes:")


@given(JSON, JSON)
def test_canonical_json_differs_for_different_values(one: Any, two: Any) -> None:
    texts = [json.dumps(value, sort_keys=True).encode() for value in (one, two)]
    assert (canonicalize_body(texts[0]) == canonicalize_body(texts[1])) == (texts[0] == texts[1])


@pytest.mark.parametrize(
    "tricky",
    [
        b'{"q":"evil","q":"good"}',
        b'{"q":"good","x":{"a":1,"a":2}}',
        b'{"q":"good","x":"evil","x":"\\u0022\\u0022"}',
    ],
)
def test_ambiguous_json_counts_as_its_bytes(tricky: bytes) -> None:
    assert canonicalize_body(tricky) == b"bytes:" + tricky


def test_parts_of_the_cache_key() -> None:
    base = cache_key(call(BODY))
    others = [
        call({**BODY, "temperature": 0.6}),
        call(BODY, provider="groq"),
        call(BODY, model="n"),
        call(BODY, dialect="anthropic"),
        call(BODY, endpoint="responses"),
        call(BODY, stream=True),
        call(BODY, settings={"gateway": "other"}),
        call(BODY, settings={"account": "other"}),
        call(BODY, settings={"providers": {"openai": {"base_url": "https://elsewhere.example"}}}),
        call(BODY, headers={"anthropic-beta": "x"}),
        call(BODY, headers={"authorization": "Bearer someone's own"}),
        call(BODY, headers={"cf-aig-cache-key": "mine"}),
    ]
    keys = [cache_key(other) for other in others]
    assert base not in keys and len(set(keys)) == len(keys)
    assert cache_key(call(BODY, headers={"user-agent": "x", "cf-aig-metadata": "{}"})) == base


def test_settings_update_changes_keys_if_enabled() -> None:
    def keys(**settings: Any) -> set[str]:
        return {cache_key(call(BODY, settings={**settings, "version": version})) for version in (1, 1, 2)}

    assert len(keys()) == 1 and len(keys(cache_invalidate_on_update=True)) == 2


def test_cache_scope_limits_sharing() -> None:
    def key(identity: Identity, scope: str) -> str:
        return cache_key(call(BODY, identity=identity, settings={"cache_scope": scope}))

    assert key(ALICE, "gateway") == key(BOB, "gateway")
    assert key(ALICE, "key") != key(BOB, "key") and key(ALICE, "user") != key(BOB, "user")
    other = Identity("k3", "alice's second", "virtual", user="alice")
    assert key(ALICE, "user") == key(other, "user") and key(ALICE, "key") != key(other, "key")


def test_custom_key_replaces_the_body_but_not_the_tenant() -> None:
    header = {"cf-aig-cache-key": "answer"}
    assert cache_key(call(BODY, headers=header)) == cache_key(call({"other": 1}, headers=header, model="n"))
    assert cache_key(call(BODY, headers=header)) != cache_key(call(BODY, headers=header, settings={"gateway": "other"}))
    assert cache_key(call(BODY, headers=header)) != cache_key(call(BODY, headers=header, stream=True))


def test_custom_key_replaces_the_steps_but_not_their_credentials() -> None:
    def key(headers: dict[str, str], endpoint: str = "chat/completions", identity: Identity = ANONYMOUS) -> str:
        made = call(b"[]", headers={"cf-aig-cache-key": "answer"}, identity=identity)
        first = RequestStep(
            "openai", "m", endpoint="chat/completions", headers={"authorization": "Bearer shared"}, body=b"{}"
        )
        made.steps = (first, RequestStep("openai", "m", endpoint=endpoint, headers=headers, body=b"{}"))
        return cache_key(made)

    keys = [key({}), *(key({name: one}) for name in CREDENTIAL_HEADERS for one in ("alice's", "bob's"))]
    keys += [key({}, f"chat/completions?{name}={one}") for name in ("key", "api_key") for one in ("alice's", "bob's")]
    assert len(set(keys)) == len(keys)
    assert key({"user-agent": "x"}, "elsewhere?alt=sse") == key({})
    assert key({"authorization": "Bearer a"}, identity=ALICE) != key({"authorization": "Bearer b"}, identity=ALICE), (
        "custom keys keep credentials apart"
    )


def test_replies_are_not_shared_across_credentials() -> None:
    def key(identity: Identity, headers: dict[str, str]) -> str:
        return cache_key(call(BODY, identity=identity, headers=headers))

    for identity in (ANONYMOUS, ALICE):
        keys = [
            key(identity, {}),
            *(key(identity, {name: one}) for name in CREDENTIAL_HEADERS for one in ("good", "wrong")),
        ]
        keys += [key(identity, {"cf-aig-byok-alias": alias}) for alias in ("one", "two")]
        assert len(set(keys)) == len(keys)
    assert key(ALICE, {}) == key(BOB, {}), "the gateway's own credential is shared"
    assert key(ALICE, {"x-api-key": "good"}) == key(BOB, {"x-api-key": "good"})


@pytest.mark.parametrize(
    ("settings", "headers", "seconds"),
    [
        ({}, {}, 0),
        (ON, {}, 60),
        (ON, {"cf-aig-cache-ttl": "3600"}, 3600),
        ({}, {"cf-aig-cache-ttl": "3600"}, 3600),
        (ON, {"cf-aig-cache-ttl": "0"}, 0),
        (ON, {"cf-aig-skip-cache": "true"}, 0),
        ({}, {"cf-aig-cache-key": "k"}, 300),
        (ON, {"cf-aig-cache-key": "k"}, 60),
        ({**ON, "zdr": True}, {}, 0),
        (ON, {"cf-aig-zdr": "true"}, 0),
    ],
)
def test_cache_ttl(settings: dict[str, Any], headers: dict[str, str], seconds: int) -> None:
    assert cache_ttl_s(call(BODY, settings=settings, headers=headers)) == seconds


# The layer


class CacheBench:
    def __init__(self, store: CacheStore | None = None, **options: Any) -> None:
        self.clock = ManualClock()
        self.cached = CacheLayer(store or MemoryCache(self.clock), self.clock, **options)
        self.handler = self.cached.wrap(self._inner)
        self.sent = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.chunks = [b"data: 1\n\n", b"data: 2\n\n"]
        self.failure: Exception | None = None
        self.status = 200

    async def _inner(self, call: GatewayRequest) -> GatewayReply:
        self.sent += 1
        number = self.sent
        await self.gate.wait()
        if self.failure is not None and not call.stream:
            raise self.failure
        reply = GatewayReply(self.status, {"content-type": "x/y", "date": "today"}, f"reply {number}".encode())
        reply.usage, reply.micros, reply.model, reply.provider = Usage(input=9, output=5), 7, "m-2026", "openai"
        if call.stream:
            reply.body = Pieces(*self.chunks, reply=reply, error=self.failure)
        return reply

    async def ask(self, **about: Any) -> tuple[GatewayReply, list[bytes]]:
        reply = await self.handler(call(**{"body": BODY, "settings": ON, **about}))
        chunks = [reply.body] if isinstance(reply.body, bytes) else []
        try:
            if not isinstance(reply.body, bytes):
                async for chunk in reply.body:
                    chunks.append(chunk)
        except UpstreamBroken:
            pass
        finally:
            await reply.close()
        return reply, chunks


def test_hit_returns_the_reply_without_cost() -> None:
    async def run() -> None:
        bench = CacheBench()
        first, body = await bench.ask()
        again, same = await bench.ask()
        assert body == same == [b"reply 1"] and bench.sent == 1
        assert (first.cached, again.cached, again.micros, again.usage) == (False, True, 0, first.usage)
        assert (again.model, again.provider, again.headers) == ("m-2026", "openai", {"content-type": "x/y"})
        assert again.ended == "complete"
        bench.clock.advance(61)
        assert (await bench.ask())[1] == [b"reply 2"]

    asyncio.run(run())


def test_streams_are_replayed_as_streams() -> None:
    async def run() -> None:
        bench = CacheBench()
        _, chunks = await bench.ask(stream=True)
        again, same = await bench.ask(stream=True)
        assert chunks == same == bench.chunks and bench.sent == 1
        assert again.cached and not isinstance(again.body, bytes) and again.ended == "complete"
        # a replay that the client leaves early ends as "left"
        reply = await bench.handler(call(BODY, settings=ON, stream=True))
        assert not isinstance(reply.body, bytes)
        await reply.body.__anext__()
        await reply.close()
        assert reply.ended == "left" and reply.cached

    asyncio.run(run())


@pytest.mark.parametrize("how", ["error", "status", "cut", "left", "large"])
def test_failed_or_incomplete_reply_is_not_cached(how: str) -> None:
    async def run() -> None:
        bench = CacheBench(max_entry_bytes=10) if how == "large" else CacheBench()
        stream = how in ("cut", "left", "large")
        if how == "error":
            bench.failure = UpstreamBroken("down")
            with pytest.raises(UpstreamBroken):
                await bench.ask()
        elif how == "left":
            reply = await bench.handler(call(BODY, settings=ON, stream=True))
            assert not isinstance(reply.body, bytes)
            await reply.body.__anext__()
            await reply.close()
        else:
            bench.status = 500 if how == "status" else 200
            bench.failure = UpstreamBroken("cut") if how == "cut" else None
            await bench.ask(stream=stream)
        bench.failure, bench.status = None, 200
        reply, _ = await bench.ask(stream=stream)
        assert not reply.cached and bench.sent == 2 and len(bench.cached._in_flight) == 0

    asyncio.run(run())


def test_of_equal_calls_in_flight_one_is_sent() -> None:
    async def run() -> None:
        bench = CacheBench()
        bench.gate.clear()
        tasks = [asyncio.create_task(bench.ask(stream=i % 2 == 0)) for i in range(20)]
        await asyncio.sleep(0.01)
        bench.gate.set()
        replies = await asyncio.gather(*tasks)
        assert bench.sent == 2 and bench.cached.stats.shared == 18  # one of each kind
        assert {tuple(chunks) for _, chunks in replies} == {(b"reply 2",), tuple(bench.chunks)}

    asyncio.run(run())


def test_waiting_calls_are_sent_when_the_first_fails() -> None:
    async def run() -> None:
        bench = CacheBench()
        bench.gate.clear()
        tasks = [asyncio.create_task(bench.ask()) for _ in range(3)]
        await asyncio.sleep(0.01)
        bench.failure = UpstreamBroken("down")
        bench.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert bench.sent == 3 and all(isinstance(result, UpstreamBroken) for result in results)

    asyncio.run(run())


def test_disconnect_of_the_first_call_keeps_the_others() -> None:
    async def run() -> None:
        bench = CacheBench()
        bench.gate.clear()
        tasks = [asyncio.create_task(bench.ask()) for _ in range(4)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        await asyncio.sleep(0.01)
        assert bench.sent == 2  # one of the waiting calls took over
        bench.gate.set()
        replies = await asyncio.gather(*tasks[1:])
        assert bench.sent == 2 and [chunks for _, chunks in replies] == [[b"reply 2"]] * 3

    asyncio.run(run())


def test_wait_for_an_equal_call_is_bounded() -> None:
    async def run() -> None:
        bench = CacheBench(max_wait_s=0.01)
        bench.gate.clear()
        first_call = asyncio.create_task(bench.ask())
        await asyncio.sleep(0.005)
        second = asyncio.create_task(bench.ask())
        while bench.sent < 2:
            await asyncio.sleep(0.005)
        bench.gate.set()
        assert (await first_call)[1] == [b"reply 1"] and (await second)[1] == [b"reply 2"]
        assert len(bench.cached._in_flight) == 0

    asyncio.run(run())


def test_without_ttl_the_cache_is_not_used() -> None:
    async def run() -> None:
        bench = CacheBench()
        await bench.ask(settings={})
        await bench.ask(headers={"cf-aig-skip-cache": "true"})
        assert bench.sent == 2 and bench.cached.stats.misses == 0

    asyncio.run(run())


# Stores


@asynccontextmanager
async def store_of(kind: str, clock: ManualClock, path: Path, **sizes: int) -> AsyncIterator[CacheStore]:
    store: CacheStore = MemoryCache(clock, **sizes) if kind == "memory" else SqliteCache(path / "c.db", clock, **sizes)
    yield store
    await store.close()


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_store_keeps_expires_and_evicts(kind: str, tmp_path: Path) -> None:
    async def run() -> None:
        clock = ManualClock(1000.0)
        async with store_of(kind, clock, tmp_path, max_bytes=10_000, max_entry_bytes=4_000) as store:
            assert await store.get("k") is None
            await store.put("k", b"one", 60)
            await store.put("k", b"two", 60)
            assert await store.get("k") == b"two"
            clock.advance(60)
            assert await store.get("k") is None
            await store.put("big", b"x" * 4_001, 60)
            assert await store.get("big") is None
            for i in range(8):
                clock.advance(61)
                await store.put(str(i), b"x" * 3_000, 10_000)
                await store.get("0")
            present = [i for i in range(8) if await store.get(str(i)) is not None]
            assert 0 in present and 7 in present and 2 <= len(present) <= 3  # entry 0 is used, so others were evicted
            assert store.failures == 0

    asyncio.run(run())


def test_memory_cache_counts_its_bytes() -> None:
    async def run() -> None:
        cache = MemoryCache(ManualClock(), max_bytes=10_000)
        for i in range(100):
            await cache.put(str(i % 30), b"x" * (37 * i % 900), 60)
        assert cache.size == sum(len(value) + ENTRY_OVERHEAD_BYTES for _, value in cache._entries.values()) <= 10_000

    asyncio.run(run())


def test_sqlite_measures_its_size_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_cache, "RECOUNT_AFTER_PUTS", 50)
    counted = 0
    count = SqliteCache._measure_size

    def counting(self: SqliteCache, base: sqlite3.Connection) -> None:
        nonlocal counted
        counted += 1
        count(self, base)

    monkeypatch.setattr(SqliteCache, "_measure_size", counting)

    async def run() -> None:
        async with store_of("sqlite", ManualClock(1000.0), tmp_path, max_bytes=1 << 20, max_entry_bytes=4_000) as store:
            for i in range(200):
                await store.put(str(i), b"x" * 100, 60)
            assert counted == 4 and store.failures == 0

    asyncio.run(run())


def test_sqlite_survives_restart_and_damage(tmp_path: Path) -> None:
    async def run() -> None:
        clock = ManualClock(1000.0)
        for value in (None, b"kept"):
            async with store_of("sqlite", clock, tmp_path) as store:
                assert await store.get("k") == value
                await store.put("k", b"kept", 60)
        (tmp_path / "c.db").write_bytes(b"this is not a database, but long enough to look like one" * 100)
        for name in ("c.db-wal", "c.db-shm"):
            (tmp_path / name).unlink(missing_ok=True)
        async with store_of("sqlite", clock, tmp_path) as store:
            await store.put("k", b"x", 60)
            assert await store.get("k") is None and store.failures == 2
            bench = CacheBench(store)
            assert (await bench.ask())[1] == [b"reply 1"] and (await bench.ask())[1] == [b"reply 2"]

    asyncio.run(run())


def test_entry_of_another_version_is_ignored() -> None:
    assert CacheEntry.decode(b"\x93\x01\x02\x03") is None and CacheEntry.decode(b"") is None
