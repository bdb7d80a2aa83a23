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

from emberline.core.breaker import CircuitBreaker
from emberline.core.clock import ManualClock
from emberline.core.config import RouterConfig
from emberline.core.errors import EngineUnavailable, ModelNotFound, Overloaded
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.routed_request import RoutedRequest, WorkerFailure
from emberline.router.policy import RoutingDecision, RoutingReason, RoutingRules, choose_worker, rendezvous_hash
from emberline.router.request_summary import RequestSummary
from emberline.router.token_estimator import TokenEstimator
from emberline.router.upstream_request import UpstreamRequest
from emberline.router.worker import RECENT_WORK_DECAY_S, RequestLoad, Worker
from emberline.server.exchange import Exchange

RULES = RoutingRules(allowed_backlog_tokens=1000.0, decode_weight=4.0)


def worker(
    name: str, open_: int = 0, running: int = 2, limit: int = 4, load: float = 10.0, ready: bool = True
) -> Worker:
    made = Worker(f"{name}/1", name, frozenset({"m"}), running, limit, CircuitBreaker(), ready)
    for key in range(open_):
        made.add_request(key, RequestLoad(load, 0.0), 0.0)
    return made


def ask(size: int = 400, session: str = "", model: str = "m") -> RequestSummary:
    return RequestSummary(model, size, False, 16, session)


def decide(
    asked: RequestSummary, workers: list[Worker], known: Mapping[str, int] | None = None, without: tuple[str, ...] = ()
) -> RoutingDecision:
    return choose_worker(asked, workers, known or {}, TokenEstimator(), RULES, 0.0, without)


LOADS = st.tuples(st.integers(0, 6), st.integers(1, 3), st.integers(0, 3), st.floats(0, 1e5), st.booleans())
CLUSTERS = st.lists(LOADS, min_size=1, max_size=5).map(
    lambda sizes: [
        worker(f"w{i}", min(open_, running + more), running, running + more, load, ready)
        for i, (open_, running, more, load, ready) in enumerate(sizes)
    ]
)


@given(CLUSTERS, st.integers(0, 100_000), st.sampled_from(["", "s1", "s2"]), st.dictionaries(
    st.sampled_from([f"w{i}/1" for i in range(5)]), st.integers(0, 200_000)))  # fmt: skip
def test_no_worker_exceeds_capacity_while_another_is_free(
    workers: list[Worker], size: int, session: str, known: dict[str, int]
) -> None:
    there = [w for w in workers if w.is_ready]
    try:
        decision = decide(ask(size, session), workers, known)
    except Overloaded as e:
        assert there and all(w.open_requests >= w.max_requests for w in there) and 1 <= e.retry_after <= 30
        return
    except EngineUnavailable:
        assert not there
        return
    best = decision.worker
    assert best.is_ready and best.open_requests < best.max_requests
    if any(w.open_requests < w.max_running for w in there):
        assert best.open_requests < best.max_running
    assert decision.load.prefill_tokens >= 0 and decision.cached_tokens >= 0
    assert decision.load.prefill_tokens + decision.cached_tokens == pytest.approx(
        TokenEstimator().estimate_prompt_tokens(size)
    )


@given(st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=8, unique=True), st.text(min_size=1, max_size=20))
def test_session_moves_only_when_its_worker_leaves(names: list[str], session: str) -> None:
    home = decide(ask(session=session), [worker(n) for n in names]).worker.name
    for gone in names:
        left = [worker(n) for n in names if n != gone]
        now = decide(ask(session=session), left)
        assert now.worker.name == home or gone == home
    assert decide(ask(session=session), [worker(n) for n in reversed(names)]).worker.name == home
    away = decide(ask(session=session), [worker(n, ready=n != home) for n in names])
    assert away.worker.name != home and away.reason is RoutingReason.PREFERRED_UNAVAILABLE


def test_sessions_spread() -> None:
    workers = [worker(n) for n in "abcd"]
    homes = Counter(decide(ask(session=f"session {i}"), workers).worker.name for i in range(400))
    assert set(homes) == set("abcd") and min(homes.values()) > 50
    firsts = Counter(max("abcd", key=lambda n, i=i: rendezvous_hash(str(i), n)) for i in range(400))  # type: ignore[misc]
    assert min(firsts.values()) > 50


def test_affinity_holds_up_to_allowed_backlog() -> None:
    home = decide(ask(session="s"), [worker("a"), worker("b")]).worker.name
    other = "b" if home == "a" else "a"
    for behind, expected, why in ((999.0, home, RoutingReason.SESSION), (1001.0, other, RoutingReason.PREFERRED_BUSY)):
        workers = [worker(home, 1, load=behind), worker(other)]
        decision = decide(ask(session="s"), workers)
        assert (decision.worker.name, decision.reason) == (expected, why)


def test_cached_tokens_count_as_saved_work() -> None:
    """4,000 bytes are 1,000 tokens: with the slack, worth as much as 2,000 tokens of other work."""
    for behind, expected, why in ((1999.0, "a", RoutingReason.PREFIX), (2001.0, "b", RoutingReason.PREFERRED_BUSY)):
        workers = [worker("a", 1, load=behind), worker("b")]
        decision = decide(ask(4000), workers, {"a/1": 4000})
        assert (decision.worker.name, decision.reason) == (expected, why)
        assert decision.load.prefill_tokens == (0.0 if expected == "a" else 1000.0)


def test_preference_is_at_most_twice_the_savings() -> None:
    """400 bytes are 100 tokens; the slack of 1,000 is not given for them."""
    for behind, expected in ((199.0, "a"), (201.0, "b")):
        assert decide(ask(400), [worker("a", 1, load=behind), worker("b")], {"a/1": 400}).worker.name == expected


def test_shared_prefix_counts_less_at_busier_worker() -> None:
    """Of 1,000 tokens known at `a`: all while it was given as little as `b`, none once it was given 4,000 more."""
    a, b = worker("a"), worker("b")
    for tokens, expected in ((0.0, a), (3990.0, a), (20.0, b)):
        a.add_request(1, RequestLoad(tokens, 0.0), 0.0)
        a.remove_request(1)
        shared = choose_worker(ask(4000), [a, b], {"a/1": 4000}, TokenEstimator(), RULES, 0.0, is_shared_prefix=True)
        assert shared.worker is expected
        assert decide(ask(4000), [a, b], {"a/1": 4000}).worker is a, "the next turn of a conversation stays"
    later = choose_worker(
        ask(4000), [a, b], {"a/1": 4000}, TokenEstimator(), RULES, RECENT_WORK_DECAY_S, is_shared_prefix=True
    )
    assert later.worker is a, "what was long ago counts less"


@pytest.mark.parametrize(("weight", "expected"), [(4.0, "prompt"), (1.0, "answer")])
def test_generated_tokens_count_by_weight(weight: float, expected: str) -> None:
    """100 tokens of an answer against 300 of a prompt, by the policy and by the router's settings."""
    answer, prompt = worker("answer"), worker("prompt")
    answer.add_request(1, RequestLoad(0.0, 100.0), 0.0)
    prompt.add_request(1, RequestLoad(300.0, 0.0), 0.0)
    rules = RoutingRules(decode_weight=weight)
    assert choose_worker(ask(), [answer, prompt], {}, TokenEstimator(), rules, 0.0).worker.name == expected
    dispatch = Dispatcher(RouterConfig(decode_weight=weight), ManualClock())
    dispatch.workers = {"answer": answer, "prompt": prompt}
    assert dispatch.choose_worker(ask(), set()).worker.name == expected


def test_least_tokens_win_without_preferred_worker() -> None:
    few_long, many_short = worker("a", 1, load=5000.0), worker("b", 3, running=8, limit=8, load=100.0)
    assert decide(ask(), [few_long, many_short]).worker is many_short
    few_long.mark_prefilled(0)
    many_short.loads[2].decode_tokens, many_short.decode_tokens = 500.0, 500.0
    assert decide(ask(), [few_long, many_short]).worker is few_long


def test_full_kv_cache_is_avoided() -> None:
    """400 bytes and 16 tokens to come need 116. Who has the prompt may still have no room for the answer."""
    home, other = worker("a"), worker("b")
    home.kv_capacity_tokens = other.kv_capacity_tokens = 1000
    for used, expected in ((884, home), (885, other)):
        home.record_heartbeat_counters(0, 0.0, used / 1000)
        assert decide(ask(), [home, other], {"a/1": 400}).worker is expected
    other.add_request(1, RequestLoad(800.0, 100.0), 0.0)  # nothing of it is in a report yet
    assert other.kv_free_tokens == 100 and decide(ask(), [home, other], {"a/1": 400}).worker is home, (
        "nobody has: as ever"
    )
    other.remove_prefill_load(1)
    assert (other.prefill_tokens, other.kv_free_tokens) == (0, 100), "another computes it, and its blocks come"
    other.mark_prefilled(1)
    assert other.kv_free_tokens == 900
    other.remove_request(1)
    assert other.kv_free_tokens == 1000 and worker("c").kv_free_tokens == math.inf


def test_equal_workers_share_prompts() -> None:
    workers = [worker(n) for n in "abc"]
    assert len({decide(replace(ask(), conversation=bytes([i])), workers).worker.name for i in range(40)}) == 3


def test_excluded_workers_are_not_chosen() -> None:
    workers = [worker("a"), worker("b")]
    assert decide(ask(), workers, {"a/1": 400}, without=("a/1",)).worker.name == "b"
    with pytest.raises(Overloaded):
        decide(ask(), workers, without=("a/1", "b/1"))


def test_error_without_available_worker() -> None:
    with pytest.raises(EngineUnavailable, match="no worker has registered"):
        decide(ask(), [])
    with pytest.raises(ModelNotFound, match="'x'") as raised:
        decide(ask(model="x"), [worker("a")])
    assert raised.value.hint == "this router serves 'm'"
    with pytest.raises(EngineUnavailable, match="no worker for the model 'm' is ready"):
        decide(ask(), [worker("a", ready=False)])


def test_full_cluster_sets_retry_after() -> None:
    full = worker("a", 4)
    full.mean_request_s = 18.0
    with pytest.raises(Overloaded) as raised:
        decide(ask(), [full])
    assert raised.value.retry_after == 5  # one of four ends about every 4.5 s


@given(st.data())
def test_loads_sum_to_zero_after_all_requests(data: st.DataObject) -> None:
    """Whatever happens to requests, in whatever order: sums are those of the open ones, and nothing stays behind."""
    one, keys = worker("a", running=4, limit=8), iter(range(1000))
    for _ in range(data.draw(st.integers(0, 30))):
        calls = ["add_request", "remove_prefill_load", "mark_prefilled", "record_generated", "remove_request"]
        what = data.draw(st.sampled_from(calls))
        if what == "add_request":
            load = RequestLoad(data.draw(st.floats(0, 1e5)), data.draw(st.floats(0, 1e4)))
            one.add_request(next(keys), load, 0.0)
        elif one.loads:
            key = data.draw(st.sampled_from(sorted(one.loads)))
            if what == "record_generated":
                one.record_generated_tokens(key, data.draw(st.integers(0, 20_000)))
            else:
                getattr(one, what)(key)
        assert one.prefill_tokens == pytest.approx(sum(load.prefill_tokens for load in one.loads.values()), abs=1e-3)
        assert one.decode_tokens == pytest.approx(sum(load.decode_tokens for load in one.loads.values()), abs=1e-3)
        assert one.uncached_tokens == pytest.approx(sum(load.uncached_tokens for load in one.loads.values()), abs=1e-3)
        assert all(load.prefill_tokens >= 0 and load.decode_tokens >= 0 for load in one.loads.values())
    for key in list(one.loads):
        one.remove_request(key, 1.0)
    assert (one.open_requests, one.prefill_tokens, one.decode_tokens, one.uncached_tokens) == (0, 0.0, 0.0, 0.0)


def test_tokens_balance_better_than_requests() -> None:
    """Skewed lengths, one after another, none ending: the busiest is near the mean. Round robin is not."""
    sizes = [40_000 if i % 4 == 0 else 400 for i in range(200)]
    workers = [worker(n, running=1000, limit=1000) for n in "abcd"]
    robin = [0.0] * 4
    for i, size in enumerate(sizes):
        decision = decide(ask(size), workers)
        decision.worker.add_request(i, decision.load, 0.0)
        robin[i % 4] += TokenEstimator().estimate_prompt_tokens(size)
    work = [w.prefill_tokens + RULES.decode_weight * w.decode_tokens for w in workers]
    assert max(work) < 1.1 * sum(work) / 4 and max(robin) > 3 * sum(robin) / 4


# Suspects


def choose_for_suspect(workers: list[Worker]) -> str | None:
    try:
        decision = choose_worker(ask(), workers, {}, TokenEstimator(), RULES, 0.0, is_suspect=True)
    except EngineUnavailable:
        return None
    assert decision.load.is_suspect
    return decision.worker.name


def test_suspect_avoids_other_suspects_and_last_worker() -> None:
    assert (
        choose_for_suspect([worker("a")]) is None
        and choose_for_suspect([worker("a"), worker("b", ready=False)]) is None
    ), "the last"
    two = [worker("a", open_=1), worker("b")]
    assert choose_for_suspect(two) == "b"
    two[1].add_request(9, RequestLoad(1.0, 1.0, is_suspect=True), 0.0)
    assert choose_for_suspect(two) is None, "each could break one of them"
    assert choose_for_suspect([*two, worker("c", open_=1)]) in ("a", "c")
    assert decide(ask(), two), "others go where they like"
    two[1].remove_request(9)
    assert choose_for_suspect(two) == "b"
    two[0].failed_since_heartbeat = True
    assert choose_for_suspect(two) is None, "it may be the last"


def test_failure_counts_until_heartbeat_of_same_processes() -> None:
    one = worker("a")
    one.engine_ids, one.failed_since_heartbeat = {"m": "engine 1"}, True
    broke = WorkerFailure(one, one.engine_ids)
    assert broke.counts_as_crash and broke.awaits_heartbeat, "it may yet be heard of"
    one.failed_since_heartbeat = False
    assert not broke.counts_as_crash, "it beats: only the connection broke"
    one.is_ready = False
    assert broke.counts_as_crash and not broke.awaits_heartbeat, "by its own word, or replaced by another process"
    one.is_ready, one.engine_ids = True, {"m": "engine 2"}
    assert broke.counts_as_crash, "its engine died"


def test_request_becomes_suspect_after_several_crashes() -> None:
    """Processes count, not how often their connections broke."""
    exchange = cast("Exchange", SimpleNamespace(status=None))
    trip = RoutedRequest(
        exchange,
        ask(),
        UpstreamRequest("POST", "/", {}, b""),
        1,
        2,
        None,
        9.0,
        3,
        3,
        is_generation=True,
        is_known_suspect=False,
    )
    workers = [worker(name) for name in "abcd"]
    for each in (workers[0], workers[0], workers[1]):
        trip.record_worker_failure(each)
    assert trip.crash_count == 2 and trip.is_suspect and not trip.exceeds_crash_limit
    workers[0].engine_ids = {"m": "another engine"}
    trip.record_worker_failure(workers[0])
    assert trip.crash_count == 3 and trip.exceeds_crash_limit and not trip.may_try_another_worker, (
        "the one it has now broke as well"
    )
    workers[1].failed_since_heartbeat = False
    assert not trip.exceeds_crash_limit and trip.is_suspect, "it is heard of"
    workers[2].is_leaving = True
    trip.record_worker_failure(workers[2])
    assert trip.crash_count == 2, "it stops anyway"
