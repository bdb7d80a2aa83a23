"""What the policy stands on: reading requests, remembering prefixes, estimates, breakers, events, membership."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.cluster.card import Beat, Card, ModelCard
from emberline.cluster.membership import Health, Membership, Patience
from emberline.core.breaker import Breaker
from emberline.core.errors import InvalidRequest
from emberline.router.ask import MOST_POINTS, SHORTEST, Ask
from emberline.router.estimate import Estimate
from emberline.router.events import LONGEST, Events
from emberline.router.prefixmap import Point, PrefixMap
from emberline.router.usage import Usage


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


# Asks


def test_every_protocol_is_read() -> None:
    assert Ask.read(body(messages=talk("x"), max_tokens=5, n=3, stream=True)).most_tokens == 15
    assert Ask.read(body(messages=talk("x"), max_completion_tokens=7)).most_tokens == 7
    assert Ask.read(body(input="hello", max_output_tokens=8)).most_tokens == 8
    assert Ask.read(body(prompt="hello")).size == len('"hello"')
    assert Ask.read(body(prompt=[1, 2, 3])).size == 3
    assert Ask.read(body(messages=talk("x"), stream=True)).stream and not Ask.read(body()).stream
    assert Ask.read(body(messages="not a list")).model == "m"  # for the worker to refuse
    for bad in (b"{", b"[]", b'{"model": 5}', b'{"model": "\xff"}'):
        with pytest.raises(InvalidRequest):
            Ask.read(bad)


LONG = "a long beginning that many share. " * 20


def test_a_conversation_that_grows_keeps_its_points_in_any_order_of_fields() -> None:
    before = Ask.read(body(messages=talk(LONG)))
    after = Ask.read(json.dumps({"stream": True, "messages": talk(LONG, "yes", "more"), "model": "m"}).encode())
    assert before.points and set(before.points) <= set(after.points)
    for other in (
        body(messages=talk("x" + LONG)),
        body(messages=talk(LONG), cache_salt="t"),
        body(messages=talk(LONG), tools=[{}]),
        body(messages=talk(LONG), model="n"),
    ):
        assert not set(Ask.read(other).points) & set(before.points)


def test_long_texts_have_points_inside_and_short_ones_none() -> None:
    shared = "y" * 10_000
    one, two = (Ask.read(body(prompt=shared + end * 3000)) for end in "ab")
    common = set(one.points) & set(two.points)
    assert max(point.length for point in common) == 8192 and min(p.length for p in one.points) == SHORTEST
    assert Ask.read(body(prompt="short")).points == ()


@settings(deadline=None)
@given(st.lists(st.text(max_size=600), max_size=120))
def test_points_are_few_and_grow(texts: list[str]) -> None:
    asked = Ask.read(body(messages=talk(*texts)))
    lengths = [point.length for point in asked.points]
    assert len(lengths) <= MOST_POINTS and lengths == sorted(set(lengths))
    assert all(SHORTEST <= length <= asked.size for length in lengths)
    if asked.size >= SHORTEST:
        assert lengths[-1] == asked.size


# The prefix map


def points(*names: str) -> list[Point]:
    return [Point(name.encode(), 100 * (i + 1)) for i, name in enumerate(names)]


def test_the_map_knows_who_saw_most_and_last() -> None:
    seen = PrefixMap(100)
    seen.saw(points("system", "one"), "a")
    seen.saw(points("system", "two", "three"), "b")
    assert seen.known(points("system", "one", "more")) == {"a": 200, "b": 100}
    assert list(seen.known(points("system", "new"))) == ["b", "a"]
    assert seen.known(points("other")) == {}


def test_a_prompt_that_continues_one_other_is_told_from_one_that_shares_its_beginning() -> None:
    seen = PrefixMap(100)
    system, first, second, third = (Point(bytes([i]), 1000 * i) for i in range(1, 5))
    assert not seen.continues([system, first])
    seen.saw([system, first], "a")
    assert not seen.continues([system, Point(b"other", 1100)]), "only the system prompt is the same"
    assert seen.continues([system, first, second])
    seen.saw([system, first, second], "a")
    assert seen.continues([system, first, second, third])
    assert not seen.continues([system, first, Point(b"branch", 2500)]), "it was continued before"
    assert seen.continues([system, first, second]), "sent again"
    seen.saw([system, first, second], "a")
    assert not seen.continues([system, first, second]), "sent by many"


@given(st.lists(st.tuples(st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=4), st.sampled_from("xyz"))))
def test_the_map_is_bounded(history: list[tuple[list[str], str]]) -> None:
    seen = PrefixMap(5)
    for names, who in history:
        seen.saw(points(*names), who)
        assert len(seen) <= 5
        if len(set(names)) == len(names):
            assert seen.known(points(*names))[who] == 100 * len(names)


# Estimates


def test_estimates_follow_what_is_reported() -> None:
    estimate, asked = Estimate(), Ask("m", 3000, False, None)
    for _ in range(100):
        estimate.correct(asked, 1000, 50)
    assert estimate.prompt(3000) == pytest.approx(1000, rel=0.01) and estimate.output(asked) == pytest.approx(
        50, rel=0.02
    )
    assert estimate.output(Ask("m", 1, False, 8)) == 8
    estimate.correct(asked, None, None)
    estimate.correct(Ask("m", 0, False, None), 0, 0)


def test_usage_is_found_in_every_protocol() -> None:
    chat = b'{"usage":{"prompt_tokens":20,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":16}}}'
    assert Usage.read(chat) == Usage(20, 4, 16)
    start = b'{"usage":{"input_tokens":4,"cache_read_input_tokens":16,"output_tokens":1}}'
    assert Usage.read(start, b'{"usage": {"output_tokens": 9}}') == Usage(20, 9, 16)
    assert Usage.read(b'data: {"content":"\\"prompt_tokens\\":7"}') == Usage()


# Breakers


def test_a_breaker_opens_pauses_and_lets_one_try() -> None:
    breaker = Breaker(limit=2, pause=1.0)
    breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert not breaker.allows(0.9) and breaker.state == "open" and breaker.allows(1.0)
    breaker.began(1.0)
    assert not breaker.allows(1.0) and breaker.state == "trying"
    breaker.failed(1.0)
    assert not breaker.allows(2.9) and breaker.allows(3.0), "the pause doubles"
    breaker.began(3.0)
    breaker.neither()
    assert breaker.allows(3.0), "a client that left proves nothing"
    breaker.began(3.0)
    breaker.succeeded()
    assert breaker.allows(3.0) and breaker.state == "closed"


def test_failures_that_began_before_it_opened_do_not_lengthen_the_pause() -> None:
    breaker = Breaker(limit=1, pause=1.0)
    for _ in range(5):
        breaker.failed(0.0)
    assert breaker.allows(1.0)


# Events


# A carriage return ends a line too: test_router_track has those.
@given(st.lists(st.binary(max_size=12).map(lambda b: re.sub(rb"[\r\n]", b" ", b)), max_size=6), st.data())
def test_events_are_cut_only_between_them_and_never_changed(texts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(b"data: %b\n\n" % text for text in texts) + data.draw(st.sampled_from([b"", b"data: par"]))
    events, sent, at = Events(), b"", 0
    while at < len(whole):
        take = data.draw(st.integers(1, 20))
        piece = events.push(whole[at : at + take])
        assert not piece or piece.endswith(b"\n\n")
        sent, at = sent + piece, at + take
    assert not events.torn
    assert sent + events.rest() == whole


def test_comments_are_left_out() -> None:
    events = Events()
    assert events.push(b": ping\n\ndata: 1\n\n: x\n\n:\n\ndata: 2\n\n: y") == b"data: 1\n\ndata: 2\n\n"
    assert events.push(b"\n\ndata: : 3\n\n") == b"data: : 3\n\n"


def test_an_event_without_end_is_not_kept_for_ever() -> None:
    events = Events()
    assert events.push(b"x" * LONGEST) == b"" and not events.torn
    assert len(events.push(b"x")) == LONGEST + 1 and events.torn
    assert events.push(b"y") == b"y" and events.push(b"z\n\n") == b"z\n\n" and not events.torn


# Membership

MODELS = (ModelCard("m", max_running=2),)


def card(name: str, incarnation: str) -> Card:
    return Card(name, incarnation, "http://127.0.0.1:1", MODELS)


def test_the_newer_of_two_wins_while_it_is_there() -> None:
    members = Membership(Patience(lost_after=4))
    assert members.register(card("a", "1"), 0.0) and members.register(card("a", "2"), 1.0)
    assert not members.register(card("a", "1"), 2.0) and members.replaced("1")
    assert not members.beat(Beat("a", "1"), 2.0) and members.beat(Beat("a", "2"), 2.0)
    assert members.register(card("a", "2"), 3.0), "registering twice is fine"
    assert [member.card.incarnation for member in members] == ["2"]
    assert not members.register(card("a", "1"), 7.0), "it may be slow"
    assert members.register(card("a", "1"), 7.1) and members.beat(Beat("a", "1"), 7.1), "it is lost"
    assert not members.beat(Beat("a", "2"), 7.2) and members.replaced("2") and not members.replaced("1")
    assert not members.register(card("a", "2"), 7.2), "now that is the newer"
    assert members.leave("a", "1") and members.register(card("a", "3"), 8.0)
    assert not members.register(card("a", "1"), 100.0), "it said goodbye"
    assert members.register(card("a", "2"), 100.0)


def health(members: Membership, now: float) -> Health:
    member = members.get("a")
    assert member is not None
    return members.health(member, now)


def test_health_is_beats_and_progress() -> None:
    members = Membership(Patience(lost_after=4, stuck_after=10, forgotten_after=100))
    members.register(card("a", "1"), 0.0)
    assert health(members, 4.0) is Health.READY and health(members, 4.1) is Health.LOST
    for now in range(1, 30):  # idle: no steps, no harm
        members.beat(Beat("a", "1", step=5), float(now))
    assert health(members, 29.0) is Health.READY
    for now in range(30, 45):
        members.beat(Beat("a", "1", step=5, running=1), float(now))
        assert health(members, now) is (Health.READY if now <= 39 else Health.STUCK)
    members.beat(Beat("a", "1", step=6, running=1), 45.0)
    assert health(members, 45.0) is Health.READY
    members.beat(Beat("a", "1", ready=False), 46.0)
    assert health(members, 46.0) is Health.STARTING


def test_who_drains_stays_who_leaves_is_forgotten_and_who_was_cut_off_may_return() -> None:
    members = Membership(Patience(lost_after=4, stuck_after=10, forgotten_after=100))
    members.register(card("a", "1"), 0.0)
    assert members.drain("a") and health(members, 1.0) is Health.DRAINING
    assert members.drain("a", on=False) and health(members, 1.0) is Health.READY
    assert not members.drain("b") and not members.leave("a", "0")
    assert members.forget(99.0) == [] and members.forget(101.0) == ["a"]
    assert members.register(card("a", "1"), 102.0)
    assert members.leave("a", "1") and members.forget(105.0) == [] and members.forget(107.0) == ["a"]
    assert not members.register(card("a", "1"), 108.0)
    assert members.register(card("a", "2"), 109.0)


@pytest.mark.parametrize(
    "url", ["http://:8001", "http://w:80010", "http://w:0", "http://me@w", "ftp://w", "w:1", "http://[::1"]
)
def test_a_worker_that_nobody_could_ask_is_not_taken(url: str) -> None:
    card = {"name": "w", "incarnation": "i", "url": url, "models": [{"name": "m"}]}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(card, Card)
    assert msgspec.convert({**card, "url": "http://[::1]:8001"}, Card)


def test_a_newer_worker_is_understood() -> None:
    model = {"name": "m", "experts": 8}
    card = {"name": "w", "incarnation": "i", "url": "http://w:1", "models": [model], "region": "eu"}
    assert msgspec.convert(card, Card) == Card("w", "i", "http://w:1", (ModelCard("m"),))
    assert msgspec.convert({"name": "w", "incarnation": "i", "watts": 700}, Beat) == Beat("w", "i")
