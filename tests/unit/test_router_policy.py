"""Which worker gets a request: by work in tokens, by affinity that yields, never to queue while another is free."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.core.breaker import Breaker
from emberline.core.clock import ManualClock
from emberline.core.config import RouterConfig
from emberline.core.errors import EngineUnavailable, ModelNotFound, Overloaded
from emberline.router.ask import Ask
from emberline.router.call import Call
from emberline.router.estimate import Estimate
from emberline.router.policy import Decision, Rules, Why, affinity, choose
from emberline.router.worker import RECENT_S, Load, Worker
from emberline.server.exchange import Exchange
from emberline.server.routing.dispatch import Dispatch
from emberline.server.routing.trip import Break, Trip

RULES = Rules(slack=1000.0, decode_weight=4.0)


def worker(
    name: str, open_: int = 0, running: int = 2, limit: int = 4, load: float = 10.0, ready: bool = True
) -> Worker:
    made = Worker(f"{name}/1", name, frozenset({"m"}), running, limit, Breaker(), ready)
    for key in range(open_):
        made.began(key, Load(load, 0.0), 0.0)
    return made


def ask(size: int = 400, session: str = "", model: str = "m") -> Ask:
    return Ask(model, size, False, 16, session)


def decide(
    asked: Ask, workers: list[Worker], known: Mapping[str, int] | None = None, without: tuple[str, ...] = ()
) -> Decision:
    return choose(asked, workers, known or {}, Estimate(), RULES, 0.0, without)


LOADS = st.tuples(st.integers(0, 6), st.integers(1, 3), st.integers(0, 3), st.floats(0, 1e5), st.booleans())
CLUSTERS = st.lists(LOADS, min_size=1, max_size=5).map(
    lambda sizes: [
        worker(f"w{i}", min(open_, running + more), running, running + more, load, ready)
        for i, (open_, running, more, load, ready) in enumerate(sizes)
    ]
)


@given(CLUSTERS, st.integers(0, 100_000), st.sampled_from(["", "s1", "s2"]), st.dictionaries(
    st.sampled_from([f"w{i}/1" for i in range(5)]), st.integers(0, 200_000)))  # fmt: skip
def test_nobody_is_over_capacity_while_another_is_free(
    workers: list[Worker], size: int, session: str, known: dict[str, int]
) -> None:
    there = [w for w in workers if w.ready]
    try:
        decision = decide(ask(size, session), workers, known)
    except Overloaded as e:
        assert there and all(w.open >= w.limit for w in there) and 1 <= e.retry_after <= 30
        return
    except EngineUnavailable:
        assert not there
        return
    best = decision.worker
    assert best.ready and best.open < best.limit
    if any(w.open < w.max_running for w in there):
        assert best.open < best.max_running
    assert decision.load.prefill >= 0 and decision.known >= 0
    assert decision.load.prefill + decision.known == pytest.approx(Estimate().prompt(size))


@given(st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=8, unique=True), st.text(min_size=1, max_size=20))
def test_a_session_moves_only_when_its_own_worker_goes(names: list[str], session: str) -> None:
    home = decide(ask(session=session), [worker(n) for n in names]).worker.name
    for gone in names:
        left = [worker(n) for n in names if n != gone]
        now = decide(ask(session=session), left)
        assert now.worker.name == home or gone == home
    assert decide(ask(session=session), [worker(n) for n in reversed(names)]).worker.name == home
    away = decide(ask(session=session), [worker(n, ready=n != home) for n in names])
    assert away.worker.name != home and away.why is Why.AWAY


def test_sessions_spread() -> None:
    workers = [worker(n) for n in "abcd"]
    homes = Counter(decide(ask(session=f"session {i}"), workers).worker.name for i in range(400))
    assert set(homes) == set("abcd") and min(homes.values()) > 50
    firsts = Counter(max("abcd", key=lambda n, i=i: affinity(str(i), n)) for i in range(400))  # type: ignore[misc]
    assert min(firsts.values()) > 50


def test_affinity_holds_up_to_the_slack_and_no_further() -> None:
    home = decide(ask(session="s"), [worker("a"), worker("b")]).worker.name
    other = "b" if home == "a" else "a"
    for behind, expected, why in ((999.0, home, Why.SESSION), (1001.0, other, Why.YIELDED)):
        workers = [worker(home, 1, load=behind), worker(other)]
        decision = decide(ask(session="s"), workers)
        assert (decision.worker.name, decision.why) == (expected, why)


def test_what_a_worker_knows_of_a_prompt_counts_as_work_saved() -> None:
    """4,000 bytes are 1,000 tokens: with the slack, worth as much as 2,000 tokens of other work."""
    for behind, expected, why in ((1999.0, "a", Why.PREFIX), (2001.0, "b", Why.YIELDED)):
        workers = [worker("a", 1, load=behind), worker("b")]
        decision = decide(ask(4000), workers, {"a/1": 4000})
        assert (decision.worker.name, decision.why) == (expected, why)
        assert decision.load.prefill == (0.0 if expected == "a" else 1000.0)


def test_a_home_is_worth_no_more_than_twice_what_it_saves() -> None:
    """400 bytes are 100 tokens; the slack of 1,000 is not given for them."""
    for behind, expected in ((199.0, "a"), (201.0, "b")):
        assert decide(ask(400), [worker("a", 1, load=behind), worker("b")], {"a/1": 400}).worker.name == expected


def test_a_beginning_that_many_share_counts_less_where_more_work_went() -> None:
    """Of 1,000 tokens known at `a`: all while it was given as little as `b`, none once it was given 4,000 more."""
    a, b = worker("a"), worker("b")
    for tokens, expected in ((0.0, a), (3990.0, a), (20.0, b)):
        a.began(1, Load(tokens, 0.0), 0.0)
        a.ended(1)
        shared = choose(ask(4000), [a, b], {"a/1": 4000}, Estimate(), RULES, 0.0, shared=True)
        assert shared.worker is expected
        assert decide(ask(4000), [a, b], {"a/1": 4000}).worker is a, "the next turn of a conversation stays"
    later = choose(ask(4000), [a, b], {"a/1": 4000}, Estimate(), RULES, RECENT_S, shared=True)
    assert later.worker is a, "what was long ago counts less"


@pytest.mark.parametrize(("weight", "expected"), [(4.0, "prompt"), (1.0, "answer")])
def test_tokens_to_be_generated_count_by_their_weight(weight: float, expected: str) -> None:
    """100 tokens of an answer against 300 of a prompt, by the policy and by the router's settings."""
    answer, prompt = worker("answer"), worker("prompt")
    answer.began(1, Load(0.0, 100.0), 0.0)
    prompt.began(1, Load(300.0, 0.0), 0.0)
    rules = Rules(decode_weight=weight)
    assert choose(ask(), [answer, prompt], {}, Estimate(), rules, 0.0).worker.name == expected
    dispatch = Dispatch(RouterConfig(decode_weight=weight), ManualClock())
    dispatch.workers = {"answer": answer, "prompt": prompt}
    assert dispatch.choose(ask(), set()).worker.name == expected


def test_without_a_home_the_least_work_wins_in_tokens_not_in_requests() -> None:
    few_long, many_short = worker("a", 1, load=5000.0), worker("b", 3, running=8, limit=8, load=100.0)
    assert decide(ask(), [few_long, many_short]).worker is many_short
    few_long.prefilled(0)
    many_short.loads[2].decode, many_short.decode = 500.0, 500.0
    assert decide(ask(), [few_long, many_short]).worker is few_long


def test_a_full_cache_is_passed_over_while_another_has_room() -> None:
    """400 bytes and 16 tokens to come need 116. Who has the prompt may still have no room for the answer."""
    home, other = worker("a"), worker("b")
    home.kv_tokens = other.kv_tokens = 1000
    for used, expected in ((884, home), (885, other)):
        home.reported(0, 0.0, used / 1000)
        assert decide(ask(), [home, other], {"a/1": 400}).worker is expected
    other.began(1, Load(800.0, 100.0), 0.0)  # nothing of it is in a report yet
    assert other.room == 100 and decide(ask(), [home, other], {"a/1": 400}).worker is home, "nobody has: as ever"
    other.relieved(1)
    assert (other.prefill, other.room) == (0, 100), "another computes it, and its blocks come"
    other.prefilled(1)
    assert other.room == 900
    other.ended(1)
    assert other.room == 1000 and worker("c").room == math.inf


def test_equals_are_not_all_given_to_the_first() -> None:
    workers = [worker(n) for n in "abc"]
    assert len({decide(replace(ask(), digest=bytes([i])), workers).worker.name for i in range(40)}) == 3


def test_who_was_tried_is_not_tried_again() -> None:
    workers = [worker("a"), worker("b")]
    assert decide(ask(), workers, {"a/1": 400}, without=("a/1",)).worker.name == "b"
    with pytest.raises(Overloaded):
        decide(ask(), workers, without=("a/1", "b/1"))


def test_why_there_is_nobody() -> None:
    with pytest.raises(EngineUnavailable, match="no worker has registered"):
        decide(ask(), [])
    with pytest.raises(ModelNotFound, match="'x'") as raised:
        decide(ask(model="x"), [worker("a")])
    assert raised.value.hint == "this router serves 'm'"
    with pytest.raises(EngineUnavailable, match="no worker for the model 'm' is ready"):
        decide(ask(), [worker("a", ready=False)])


def test_a_full_cluster_says_when_to_come_back() -> None:
    full = worker("a", 4)
    full.seconds = 18.0
    with pytest.raises(Overloaded) as raised:
        decide(ask(), [full])
    assert raised.value.retry_after == 5  # one of four ends about every 4.5 s


@given(st.data())
def test_accounts_are_even_when_all_is_over(data: st.DataObject) -> None:
    """Whatever happens to requests, in whatever order: sums are those of the open ones, and nothing stays behind."""
    one, keys = worker("a", running=4, limit=8), iter(range(1000))
    for _ in range(data.draw(st.integers(0, 30))):
        what = data.draw(st.sampled_from(["began", "relieved", "prefilled", "generated", "ended"]))
        if what == "began":
            load = Load(data.draw(st.floats(0, 1e5)), data.draw(st.floats(0, 1e4)))
            one.began(next(keys), load, 0.0)
        elif one.loads:
            key = data.draw(st.sampled_from(sorted(one.loads)))
            if what == "generated":
                one.generated(key, data.draw(st.integers(0, 20_000)))
            else:
                getattr(one, what)(key)
        assert one.prefill == pytest.approx(sum(load.prefill for load in one.loads.values()), abs=1e-3)
        assert one.decode == pytest.approx(sum(load.decode for load in one.loads.values()), abs=1e-3)
        assert one.coming == pytest.approx(sum(load.coming for load in one.loads.values()), abs=1e-3)
        assert all(load.prefill >= 0 and load.decode >= 0 for load in one.loads.values())
    for key in list(one.loads):
        one.ended(key, 1.0)
    assert (one.open, one.prefill, one.decode, one.coming) == (0, 0.0, 0.0, 0.0)


def test_tokens_balance_better_than_requests_do() -> None:
    """Skewed lengths, one after another, none ending: the busiest is near the mean. Round robin is not."""
    sizes = [40_000 if i % 4 == 0 else 400 for i in range(200)]
    workers = [worker(n, running=1000, limit=1000) for n in "abcd"]
    robin = [0.0] * 4
    for i, size in enumerate(sizes):
        decision = decide(ask(size), workers)
        decision.worker.began(i, decision.load, 0.0)
        robin[i % 4] += Estimate().prompt(size)
    work = [w.prefill + RULES.decode_weight * w.decode for w in workers]
    assert max(work) < 1.1 * sum(work) / 4 and max(robin) > 3 * sum(robin) / 4


# Suspects


def suspected(workers: list[Worker]) -> str | None:
    try:
        decision = choose(ask(), workers, {}, Estimate(), RULES, 0.0, suspect=True)
    except EngineUnavailable:
        return None
    assert decision.load.suspect
    return decision.worker.name


def test_a_suspect_is_kept_from_other_suspects_and_from_the_last_worker() -> None:
    assert suspected([worker("a")]) is None and suspected([worker("a"), worker("b", ready=False)]) is None, "the last"
    two = [worker("a", open_=1), worker("b")]
    assert suspected(two) == "b"
    two[1].began(9, Load(1.0, 1.0, suspect=True), 0.0)
    assert suspected(two) is None, "each could break one of them"
    assert suspected([*two, worker("c", open_=1)]) in ("a", "c")
    assert decide(ask(), two), "others go where they like"
    two[1].ended(9)
    assert suspected(two) == "b"
    two[0].doubted = True
    assert suspected(two) is None, "it may be the last"


def test_a_break_stands_until_the_same_processes_are_heard_of() -> None:
    one = worker("a")
    one.peers, one.doubted = {"m": "engine 1"}, True
    broke = Break(one, one.peers)
    assert broke.stands and broke.open, "it may yet be heard of"
    one.doubted = False
    assert not broke.stands, "it beats: only the connection broke"
    one.ready = False
    assert broke.stands and not broke.open, "by its own word, or replaced by another process"
    one.ready, one.peers = True, {"m": "engine 2"}
    assert broke.stands, "its engine died"


def test_a_suspect_has_seen_several_workers_die() -> None:
    """Processes count, not how often their connections broke."""
    exchange = cast("Exchange", SimpleNamespace(status=None))
    trip = Trip(exchange, ask(), Call("POST", "/", {}, b""), 1, 2, None, 9.0, 3, 3, generates=True, accused=False)
    workers = [worker(name) for name in "abcd"]
    for each in (workers[0], workers[0], workers[1]):
        trip.broke(each)
    assert trip.crashes == 2 and trip.suspect and not trip.guilty
    workers[0].peers = {"m": "another engine"}
    trip.broke(workers[0])
    assert trip.crashes == 3 and trip.guilty and not trip.goes_on, "the one it has now broke as well"
    workers[1].doubted = False
    assert not trip.guilty and trip.suspect, "it is heard of"
    workers[2].left = True
    trip.broke(workers[2])
    assert trip.crashes == 2, "it stops anyway"
