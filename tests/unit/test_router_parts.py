"""What the policy stands on: reading requests, remembering prefixes, estimates, breakers, events, membership."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.cluster.membership import HealthTimeouts, Membership, WorkerHealth
from emberline.cluster.registration import Heartbeat, ModelRegistration, WorkerRegistration
from emberline.core.breaker import CircuitBreaker
from emberline.core.errors import InvalidRequest
from emberline.router.prefixmap import PrefixMap, PromptPrefix
from emberline.router.reply_usage import ReplyUsage
from emberline.router.request_summary import MAX_PREFIXES_PER_PROMPT, MIN_PREFIX_BYTES, RequestSummary
from emberline.router.sse_buffer import MAX_EVENT_BYTES, SSEBuffer
from emberline.router.token_estimator import TokenEstimator


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def conversation(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


# Asks


def test_summary_of_every_protocol() -> None:
    assert RequestSummary.parse(body(messages=conversation("x"), max_tokens=5, n=3, stream=True)).max_tokens == 15
    assert RequestSummary.parse(body(messages=conversation("x"), max_completion_tokens=7)).max_tokens == 7
    assert RequestSummary.parse(body(input="hello", max_output_tokens=8)).max_tokens == 8
    assert RequestSummary.parse(body(prompt="hello")).prompt_bytes == len('"hello"')
    assert RequestSummary.parse(body(prompt=[1, 2, 3])).prompt_bytes == 3
    assert (
        RequestSummary.parse(body(messages=conversation("x"), stream=True)).stream
        and not RequestSummary.parse(body()).stream
    )
    assert RequestSummary.parse(body(messages="not a list")).model == "m"  # for the worker to refuse
    for bad in (b"{", b"[]", b'{"model": 5}', b'{"model": "\xff"}'):
        with pytest.raises(InvalidRequest):
            RequestSummary.parse(bad)


LONG = "a long beginning that many share. " * 20


def test_growing_conversation_keeps_prefixes_in_any_field_order() -> None:
    before = RequestSummary.parse(body(messages=conversation(LONG)))
    after = RequestSummary.parse(
        json.dumps({"stream": True, "messages": conversation(LONG, "yes", "more"), "model": "m"}).encode()
    )
    assert before.prefixes and set(before.prefixes) <= set(after.prefixes)
    for other in (
        body(messages=conversation("x" + LONG)),
        body(messages=conversation(LONG), cache_salt="t"),
        body(messages=conversation(LONG), tools=[{}]),
        body(messages=conversation(LONG), model="n"),
    ):
        assert not set(RequestSummary.parse(other).prefixes) & set(before.prefixes)


def test_long_texts_have_inner_prefixes() -> None:
    shared = "y" * 10_000
    one, two = (RequestSummary.parse(body(prompt=shared + end * 3000)) for end in "ab")
    common = set(one.prefixes) & set(two.prefixes)
    assert max(point.length for point in common) == 8192 and min(p.length for p in one.prefixes) == MIN_PREFIX_BYTES
    assert RequestSummary.parse(body(prompt="short")).prefixes == ()


@settings(deadline=None)
@given(st.lists(st.text(max_size=600), max_size=120))
def test_prefixes_are_bounded_and_grow(texts: list[str]) -> None:
    asked = RequestSummary.parse(body(messages=conversation(*texts)))
    lengths = [point.length for point in asked.prefixes]
    assert len(lengths) <= MAX_PREFIXES_PER_PROMPT and lengths == sorted(set(lengths))
    assert all(MIN_PREFIX_BYTES <= length <= asked.prompt_bytes for length in lengths)
    if asked.prompt_bytes >= MIN_PREFIX_BYTES:
        assert lengths[-1] == asked.prompt_bytes


# The prefix map


def points(*names: str) -> list[PromptPrefix]:
    return [PromptPrefix(name.encode(), 100 * (i + 1)) for i, name in enumerate(names)]


def test_prefix_map_orders_by_length_then_recency() -> None:
    seen = PrefixMap(100)
    seen.record_prompt(points("system", "one"), "a")
    seen.record_prompt(points("system", "two", "three"), "b")
    assert seen.cached_bytes_by_worker(points("system", "one", "more")) == {"a": 200, "b": 100}
    assert list(seen.cached_bytes_by_worker(points("system", "new"))) == ["b", "a"]
    assert seen.cached_bytes_by_worker(points("other")) == {}


def test_continued_conversation_differs_from_shared_prefix() -> None:
    seen = PrefixMap(100)
    system, first, second, third = (PromptPrefix(bytes([i]), 1000 * i) for i in range(1, 5))
    assert not seen.continues_conversation([system, first])
    seen.record_prompt([system, first], "a")
    assert not seen.continues_conversation([system, PromptPrefix(b"other", 1100)]), "only the system prompt is the same"
    assert seen.continues_conversation([system, first, second])
    seen.record_prompt([system, first, second], "a")
    assert seen.continues_conversation([system, first, second, third])
    assert not seen.continues_conversation([system, first, PromptPrefix(b"branch", 2500)]), "it was continued before"
    assert seen.continues_conversation([system, first, second]), "sent again"
    seen.record_prompt([system, first, second], "a")
    assert not seen.continues_conversation([system, first, second]), "sent by many"


@given(st.lists(st.tuples(st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=4), st.sampled_from("xyz"))))
def test_prefix_map_is_bounded(history: list[tuple[list[str], str]]) -> None:
    seen = PrefixMap(5)
    for names, who in history:
        seen.record_prompt(points(*names), who)
        assert len(seen) <= 5
        if len(set(names)) == len(names):
            assert seen.cached_bytes_by_worker(points(*names))[who] == 100 * len(names)


# Estimates


def test_estimates_follow_usage() -> None:
    estimate, asked = TokenEstimator(), RequestSummary("m", 3000, False, None)
    for _ in range(100):
        estimate.update_averages(asked, 1000, 50)
    assert estimate.estimate_prompt_tokens(3000) == pytest.approx(1000, rel=0.01) and estimate.estimate_output_tokens(
        asked
    ) == pytest.approx(50, rel=0.02)
    assert estimate.estimate_output_tokens(RequestSummary("m", 1, False, 8)) == 8
    estimate.update_averages(asked, None, None)
    estimate.update_averages(RequestSummary("m", 0, False, None), 0, 0)


def test_usage_is_found_in_every_protocol() -> None:
    chat = b'{"usage":{"prompt_tokens":20,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":16}}}'
    assert ReplyUsage.parse(chat) == ReplyUsage(20, 4, 16)
    start = b'{"usage":{"input_tokens":4,"cache_read_input_tokens":16,"output_tokens":1}}'
    assert ReplyUsage.parse(start, b'{"usage": {"output_tokens": 9}}') == ReplyUsage(20, 9, 16)
    assert ReplyUsage.parse(b'data: {"content":"\\"prompt_tokens\\":7"}') == ReplyUsage()


# Breakers


def test_breaker_opens_pauses_and_probes() -> None:
    breaker = CircuitBreaker(failure_limit=2, first_pause_s=1.0)
    breaker.record_failure(0.0)
    assert breaker.allows_request(0.0)
    breaker.record_failure(0.0)
    assert not breaker.allows_request(0.9) and breaker.state == "open" and breaker.allows_request(1.0)
    breaker.record_start(1.0)
    assert not breaker.allows_request(1.0) and breaker.state == "trying"
    breaker.record_failure(1.0)
    assert not breaker.allows_request(2.9) and breaker.allows_request(3.0), "the pause doubles"
    breaker.record_start(3.0)
    breaker.record_cancellation()
    assert breaker.allows_request(3.0), "a client that left proves nothing"
    breaker.record_start(3.0)
    breaker.record_success()
    assert breaker.allows_request(3.0) and breaker.state == "closed"


def test_earlier_failures_do_not_extend_breaker_pause() -> None:
    breaker = CircuitBreaker(failure_limit=1, first_pause_s=1.0)
    for _ in range(5):
        breaker.record_failure(0.0)
    assert breaker.allows_request(1.0)


# Events


# A carriage return ends a line too: test_router_track has those.
@given(st.lists(st.binary(max_size=12).map(lambda b: re.sub(rb"[\r\n]", b" ", b)), max_size=6), st.data())
def test_events_pass_whole_and_unchanged(texts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(b"data: %b\n\n" % text for text in texts) + data.draw(st.sampled_from([b"", b"data: par"]))
    events, sent, at = SSEBuffer(), b"", 0
    while at < len(whole):
        take = data.draw(st.integers(1, 20))
        piece = events.push(whole[at : at + take])
        assert not piece or piece.endswith(b"\n\n")
        sent, at = sent + piece, at + take
    assert not events.is_mid_event
    assert sent + events.take_remaining_bytes() == whole


def test_comments_are_removed() -> None:
    events = SSEBuffer()
    assert events.push(b": ping\n\ndata: 1\n\n: x\n\n:\n\ndata: 2\n\n: y") == b"data: 1\n\ndata: 2\n\n"
    assert events.push(b"\n\ndata: : 3\n\n") == b"data: : 3\n\n"


def test_endless_event_is_not_buffered_forever() -> None:
    events = SSEBuffer()
    assert events.push(b"x" * MAX_EVENT_BYTES) == b"" and not events.is_mid_event
    assert len(events.push(b"x")) == MAX_EVENT_BYTES + 1 and events.is_mid_event
    assert events.push(b"y") == b"y" and events.push(b"z\n\n") == b"z\n\n" and not events.is_mid_event


# Membership

MODELS = (ModelRegistration("m", max_running=2),)


def new_registration(name: str, incarnation: str) -> WorkerRegistration:
    return WorkerRegistration(name, incarnation, "http://127.0.0.1:1", MODELS)


def test_newer_process_owns_name_while_alive() -> None:
    members = Membership(HealthTimeouts(lost_after=4))
    assert members.register(new_registration("a", "1"), 0.0) and members.register(new_registration("a", "2"), 1.0)
    assert not members.register(new_registration("a", "1"), 2.0) and members.is_replaced("1")
    assert not members.record_heartbeat(Heartbeat("a", "1"), 2.0) and members.record_heartbeat(Heartbeat("a", "2"), 2.0)
    assert members.register(new_registration("a", "2"), 3.0), "registering twice is fine"
    assert [member.registration.incarnation for member in members] == ["2"]
    assert not members.register(new_registration("a", "1"), 7.0), "it may be slow"
    assert members.register(new_registration("a", "1"), 7.1) and members.record_heartbeat(Heartbeat("a", "1"), 7.1), (
        "it is lost"
    )
    assert (
        not members.record_heartbeat(Heartbeat("a", "2"), 7.2)
        and members.is_replaced("2")
        and not members.is_replaced("1")
    )
    assert not members.register(new_registration("a", "2"), 7.2), "now that is the newer"
    assert members.mark_leaving("a", "1") and members.register(new_registration("a", "3"), 8.0)
    assert not members.register(new_registration("a", "1"), 100.0), "it said goodbye"
    assert members.register(new_registration("a", "2"), 100.0)


def health(members: Membership, now: float) -> WorkerHealth:
    member = members.get("a")
    assert member is not None
    return members.health(member, now)


def test_health_follows_heartbeats_and_steps() -> None:
    members = Membership(HealthTimeouts(lost_after=4, stuck_after=10, forgotten_after=100))
    members.register(new_registration("a", "1"), 0.0)
    assert health(members, 4.0) is WorkerHealth.READY and health(members, 4.1) is WorkerHealth.LOST
    for now in range(1, 30):  # idle: no steps, no harm
        members.record_heartbeat(Heartbeat("a", "1", step=5), float(now))
    assert health(members, 29.0) is WorkerHealth.READY
    for now in range(30, 45):
        members.record_heartbeat(Heartbeat("a", "1", step=5, running=1), float(now))
        assert health(members, now) is (WorkerHealth.READY if now <= 39 else WorkerHealth.STUCK)
    members.record_heartbeat(Heartbeat("a", "1", step=6, running=1), 45.0)
    assert health(members, 45.0) is WorkerHealth.READY
    members.record_heartbeat(Heartbeat("a", "1", ready=False), 46.0)
    assert health(members, 46.0) is WorkerHealth.STARTING


def test_draining_stays_leaving_expires_lost_may_return() -> None:
    members = Membership(HealthTimeouts(lost_after=4, stuck_after=10, forgotten_after=100))
    members.register(new_registration("a", "1"), 0.0)
    assert members.set_draining("a") and health(members, 1.0) is WorkerHealth.DRAINING
    assert members.set_draining("a", is_draining=False) and health(members, 1.0) is WorkerHealth.READY
    assert not members.set_draining("b") and not members.mark_leaving("a", "0")
    assert members.remove_expired_workers(99.0) == [] and members.remove_expired_workers(101.0) == ["a"]
    assert members.register(new_registration("a", "1"), 102.0)
    assert (
        members.mark_leaving("a", "1")
        and members.remove_expired_workers(105.0) == []
        and members.remove_expired_workers(107.0) == ["a"]
    )
    assert not members.register(new_registration("a", "1"), 108.0)
    assert members.register(new_registration("a", "2"), 109.0)


@pytest.mark.parametrize(
    "url", ["http://:8001", "http://w:80010", "http://w:0", "http://me@w", "ftp://w", "w:1", "http://[::1"]
)
def test_unreachable_worker_url_is_refused(url: str) -> None:
    new_registration = {"name": "w", "incarnation": "i", "url": url, "models": [{"name": "m"}]}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(new_registration, WorkerRegistration)
    assert msgspec.convert({**new_registration, "url": "http://[::1]:8001"}, WorkerRegistration)


def test_unknown_registration_fields_are_ignored() -> None:
    model = {"name": "m", "experts": 8}
    new_registration = {"name": "w", "incarnation": "i", "url": "http://w:1", "models": [model], "region": "eu"}
    assert msgspec.convert(new_registration, WorkerRegistration) == WorkerRegistration(
        "w", "i", "http://w:1", (ModelRegistration("m"),)
    )
    assert msgspec.convert({"name": "w", "incarnation": "i", "watts": 700}, Heartbeat) == Heartbeat("w", "i")
