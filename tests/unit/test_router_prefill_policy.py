"""Whether a prefill worker computes a prompt, and which: by pairing, load, cache and rate."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.core.breaker import CircuitBreaker
from emberline.core.errors import Overloaded
from emberline.router.policy import RoutingDecision, RoutingReason, RoutingRules, choose_worker
from emberline.router.prefill_policy import choose_prefill_worker
from emberline.router.request_summary import RequestSummary
from emberline.router.token_estimator import TokenEstimator
from emberline.router.worker import RequestLoad, Worker

RULES = RoutingRules(min_split_tokens=100.0)
ASK = RequestSummary("m", 4000, True, 16, is_single_sequence=True)  # 1,000 tokens


def worker(name: str, role: str = "prefill", open_: int = 0, running: int = 2, limit: int = 4) -> Worker:
    made = Worker(
        f"{name}/1",
        name,
        frozenset({"m"}),
        running,
        limit,
        CircuitBreaker(),
        role=role,
        engine_ids={"m": f"engine {name}"},
    )
    made.paired_engine_ids = frozenset(f"engine p{i}" for i in range(4))
    for key in range(open_):
        made.add_request(key, RequestLoad(10.0, 0.0), 0.0)
    return made


def pick(
    ask: RequestSummary, workers: list[Worker], known: dict[str, int] | None = None, open_: int = 0, before: float = 0.0
) -> str | None:
    """`before`: tokens that who answers has to compute besides."""
    to = worker("d", "decode", open_)
    answering = RoutingDecision(
        to,
        RequestLoad(TokenEstimator().estimate_prompt_tokens(ask.prompt_bytes - (known or {}).get("d/1", 0)), 16.0),
        RoutingReason.LOAD,
        0.0,
    )
    to.add_request(99, RequestLoad(before + answering.load.prefill_tokens, 16.0), 0.0)
    chosen = choose_prefill_worker(ask, answering, [to, *workers], known or {}, TokenEstimator(), RULES, 0.0)
    assert chosen is None or (chosen.reason is RoutingReason.SPLIT and chosen.load.decode_tokens == 0.0)
    return chosen and chosen.worker.name


def test_only_long_uncached_prompts_are_split() -> None:
    assert pick(ASK, [worker("p0")]) == "p0"
    assert (
        pick(replace(ASK, prompt_bytes=400), [worker("p0")]) == "p0"
        and pick(replace(ASK, prompt_bytes=396), [worker("p0")]) is None
    )
    assert pick(ASK, [worker("p0")], {"d/1": 3900}) is None, "it has most of the prompt"
    assert pick(replace(ASK, is_single_sequence=False), [worker("p0")]) is None
    assert pick(ASK, []) is None


def test_only_paired_prefill_workers_are_chosen() -> None:
    assert pick(ASK, [worker("stranger")]) is None, "not paired"
    assert pick(ASK, [worker("p0", "both"), worker("p1", "decode")]) is None
    away = worker("p0")
    away.is_ready = False
    assert pick(ASK, [away]) is None and pick(replace(ASK, model="other"), [worker("p0")]) is None
    broken = worker("p0")
    for _ in range(3):
        broken.breaker.record_failure(0.0)
    assert pick(ASK, [broken]) is None and pick(ASK, [broken, worker("p1")]) == "p1"


def test_no_split_if_prefill_worker_is_fuller() -> None:
    assert pick(ASK, [worker("p0", open_=1)]) == "p0", "it has room"
    assert pick(ASK, [worker("p0", open_=2)]) is None, "it is fuller than who answers"
    assert pick(ASK, [worker("p0", open_=2)], open_=2) == "p0" and pick(ASK, [worker("p0", open_=4)], open_=4) is None


def test_cached_or_least_loaded_prefill_worker_is_chosen() -> None:
    two = [worker("p0"), worker("p1", open_=1)]
    assert pick(ASK, two) == "p0" and pick(ASK, two, {"p1/1": 400}) == "p1" and pick(ASK, two, {"p1/1": 20}) == "p0"


def worker_with_rate(name: str, rate: int, queued: float = 0.0) -> Worker:
    made = worker(name)
    made.record_heartbeat_counters(0, 0.0)
    made.record_heartbeat_counters(rate, 1.0)
    made.add_request(0, RequestLoad(queued, 0.0), 0.0)
    return made


def test_split_delay_is_limited() -> None:
    """At 100 tokens a second, with 3 s of patience: 1,000 tokens take 10 s wherever they are computed."""
    assert (
        pick(ASK, [worker_with_rate("p0", 100, 300.0)]) == "p0"
        and pick(ASK, [worker_with_rate("p0", 100, 301.0)]) is None
    )
    assert pick(ASK, [worker_with_rate("p0", 100, 900.0)], before=600.0) == "p0", "one would wait here too"
    assert pick(ASK, [worker_with_rate("p0", 100, 5200.0)], before=5000.0) == "p0", "however long that is"
    assert pick(ASK, [worker_with_rate("p0", 100, 700.0)], {"p0/1": 2000}) == "p0", "it knows half of the prompt"
    assert pick(ASK, [worker_with_rate("p0", 100, 400.0), worker_with_rate("p1", 200, 500.0)]) == "p1", "it is faster"


def test_backlog_follows_heartbeats() -> None:
    one = worker_with_rate("p0", 100, 1000.0)
    one.add_request(1, RequestLoad(500.0, 0.0), 0.0)
    one.record_heartbeat_counters(700, 7.0)
    assert one.prefill_tokens == 900.0 and one.loads[0].prefill_tokens == 400.0, "600 more were computed, of the oldest"
    one.remove_request(0, duration_s=10.0)
    one.record_heartbeat_counters(1150, 11.5)  # of these 400 were the first one's last
    assert one.prefill_tokens == pytest.approx(450.0) and one.prefill_rate.tokens_per_s == pytest.approx(100.0)
    one.record_heartbeat_counters(80, 0.4)
    assert one.prefill_tokens == pytest.approx(450.0) and one.prefill_rate.tokens_per_s == pytest.approx(100.0), (
        "another engine counts anew"
    )
    one.record_heartbeat_counters(380, 1.4)
    assert one.prefill_tokens == pytest.approx(150.0) and 100.0 < one.prefill_rate.tokens_per_s < 300.0, "it learns"
    one.remove_request(1)
    assert one.prefill_tokens == 0.0


@dataclass
class Prompt:
    key: int
    came: float
    left: float = 1000.0  # tokens
    due: float = 0.0  # when it is given up, if nobody has begun


def simulate_queue(reports: bool) -> tuple[float, int]:
    """A worker that prefills and one that decodes compute 100 tokens a second each, prompts come faster than the first
    can: their mean seconds to the end of the prompt, and how many were given up 10 s after they were to begin."""
    dice = random.Random(1)
    there, here = worker("p0", running=64, limit=128), worker("d", "decode", running=64, limit=128)
    at: dict[str, list[Prompt]] = {"p0": [], "d": []}
    waits, late, computed, arrives, keys = list[float](), 0, 0.0, 0.0, itertools.count()
    for tick in range(10_000):
        now = tick / 10
        while arrives <= now:
            prompt = Prompt(next(keys), now)
            answering = RoutingDecision(here, RequestLoad(1000.0, 16.0), RoutingReason.LOAD, 0.0)
            here.add_request(prompt.key, answering.load, now)
            chosen = choose_prefill_worker(ASK, answering, [there, here], {}, TokenEstimator(), RULES, now)
            if chosen is not None:
                prompt.due = now + chosen.wait_s + 10.0
                there.add_request(prompt.key, chosen.load, now)
                here.mark_prefilled(prompt.key)
            at[chosen.worker.name if chosen else "d"].append(prompt)
            arrives += dice.expovariate(0.13)
        for prompt in [each for each in at["p0"][1:] if now > each.due]:
            at["p0"].remove(prompt)
            there.remove_request(prompt.key)
            here.add_prefill_load(prompt.key, 1000.0)
            at["d"].append(prompt)
            late += 1
        for one in (there, here):
            if queue := at[one.name]:
                queue[0].left -= 10.0
                computed += 10.0 * (one is there)
                if queue[0].left <= 0:
                    done = queue.pop(0)
                    one.remove_request(done.key, duration_s=now - done.came)
                    if one is there:
                        here.remove_request(done.key)
                    waits.append(now - done.came)
        if reports and tick % 10 == 0:
            there.record_heartbeat_counters(int(computed), computed / 100)
    return sum(waits) / len(waits), late


def test_known_rate_avoids_late_prefills() -> None:
    blind, seeing = simulate_queue(reports=False), simulate_queue(reports=True)
    assert blind[1] > 20 and seeing[1] == 0 and seeing[0] < 0.85 * blind[0]


@given(st.lists(st.sampled_from(["prefill", "decode", "both"]), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_prefill_worker_answers_only_as_last_resort(roles: list[str], session: bool, tried: bool) -> None:
    workers = [worker(f"w{i}", role) for i, role in enumerate(roles)]
    others = [w for w in workers if w.role != "prefill"]
    without = {w.id for w in others} if tried else set()
    left = [w for w in workers if w.id not in without]
    ask = replace(ASK, session="s" if session else "")
    if not left:
        with pytest.raises(Overloaded):
            choose_worker(ask, workers, {}, TokenEstimator(), RULES, 0.0, without)
        return
    chosen = choose_worker(ask, workers, {}, TokenEstimator(), RULES, 0.0, without).worker
    assert (chosen.role == "prefill") == (tried or not others)


def test_started_stream_continues_at_full_worker() -> None:
    full = worker("w", "both", open_=4)
    with pytest.raises(Overloaded):
        choose_worker(ASK, [full], {}, TokenEstimator(), RULES, 0.0)
    assert choose_worker(ASK, [full], {}, TokenEstimator(), RULES, 0.0, ignore_capacity_limits=True).worker is full
    free = worker("v", "both")
    assert (
        choose_worker(
            ASK, [full, free], {"w/1": 4000}, TokenEstimator(), RULES, 0.0, ignore_capacity_limits=True
        ).worker
        is free
    )


@pytest.mark.parametrize(
    ("body", "single"),
    [
        ({"messages": []}, True),
        ({"messages": [], "n": 1}, True),
        ({"messages": [], "n": 2}, False),
        ({"prompt": "text"}, True),
        ({"prompt": ["text"]}, True),
        ({"prompt": ["one", "two"]}, False),
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": [[1, 2], [3]]}, False),
        ({"prompt": "text", "echo": True}, False),
        ({"prompt": "text", "prompt_logprobs": 0}, False),
        ({"input": [{"role": "user"}]}, True),
        ({"messages": 5}, False),
    ],
)
def test_only_single_sequences_are_split(body: dict[str, Any], single: bool) -> None:
    assert RequestSummary.parse(json.dumps({"model": "m", **body}).encode()).is_single_sequence is single
