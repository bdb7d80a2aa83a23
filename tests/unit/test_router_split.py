"""Whether a prompt is computed elsewhere, and where: what is worth it, by who is paired, has room, and knows most."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.core.breaker import Breaker
from emberline.core.errors import Overloaded
from emberline.router.ask import Ask
from emberline.router.estimate import Estimate
from emberline.router.policy import Decision, Rules, Why, choose
from emberline.router.split import split
from emberline.router.worker import Load, Worker

RULES = Rules(split_tokens=100.0)
ASK = Ask("m", 4000, True, 16, single=True)  # 1,000 tokens


def worker(name: str, role: str = "prefill", open_: int = 0, running: int = 2, limit: int = 4) -> Worker:
    made = Worker(
        f"{name}/1", name, frozenset({"m"}), running, limit, Breaker(), role=role, peers={"m": f"engine {name}"}
    )
    made.paired = frozenset(f"engine p{i}" for i in range(4))
    for key in range(open_):
        made.began(key, Load(10.0, 0.0), 0.0)
    return made


def pick(ask: Ask, workers: list[Worker], known: dict[str, int] | None = None, open_: int = 0) -> str | None:
    to = worker("d", "decode", open_)
    answering = Decision(to, Load(Estimate().prompt(ask.size - (known or {}).get("d/1", 0)), 16.0), Why.LOAD, 0.0)
    chosen = split(ask, answering, [to, *workers], known or {}, Estimate(), RULES, 0.0)
    assert chosen is None or (chosen.why is Why.SPLIT and chosen.load.decode == 0.0)
    return chosen and chosen.worker.name


def test_what_is_worth_it() -> None:
    assert pick(ASK, [worker("p0")]) == "p0"
    assert pick(replace(ASK, size=400), [worker("p0")]) == "p0" and pick(replace(ASK, size=396), [worker("p0")]) is None
    assert pick(ASK, [worker("p0")], {"d/1": 3900}) is None, "it has most of the prompt"
    assert pick(replace(ASK, single=False), [worker("p0")]) is None
    assert pick(ASK, []) is None


def test_who_can() -> None:
    assert pick(ASK, [worker("stranger")]) is None, "not paired"
    assert pick(ASK, [worker("p0", "both"), worker("p1", "decode")]) is None
    away = worker("p0")
    away.ready = False
    assert pick(ASK, [away]) is None and pick(replace(ASK, model="other"), [worker("p0")]) is None
    broken = worker("p0")
    for _ in range(3):
        broken.breaker.failed(0.0)
    assert pick(ASK, [broken]) is None and pick(ASK, [broken, worker("p1")]) == "p1"


def test_nobody_queues_for_it_who_need_not() -> None:
    assert pick(ASK, [worker("p0", open_=1)]) == "p0", "it has room"
    assert pick(ASK, [worker("p0", open_=2)]) is None, "it is fuller than who answers"
    assert pick(ASK, [worker("p0", open_=2)], open_=2) == "p0" and pick(ASK, [worker("p0", open_=4)], open_=4) is None


def test_who_knows_most_or_has_least_to_do() -> None:
    two = [worker("p0"), worker("p1", open_=1)]
    assert pick(ASK, two) == "p0" and pick(ASK, two, {"p1/1": 400}) == "p1" and pick(ASK, two, {"p1/1": 20}) == "p0"


@given(st.lists(st.sampled_from(["prefill", "decode", "both"]), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_who_prefills_answers_only_if_nobody_else_can(roles: list[str], session: bool, tried: bool) -> None:
    workers = [worker(f"w{i}", role) for i, role in enumerate(roles)]
    others = [w for w in workers if w.role != "prefill"]
    without = {w.id for w in others} if tried else set()
    left = [w for w in workers if w.id not in without]
    ask = replace(ASK, session="s" if session else "")
    if not left:
        with pytest.raises(Overloaded):
            choose(ask, workers, {}, Estimate(), RULES, 0.0, without)
        return
    chosen = choose(ask, workers, {}, Estimate(), RULES, 0.0, without).worker
    assert (chosen.role == "prefill") == (tried or not others)


def test_what_has_begun_goes_on_where_it_is_full() -> None:
    full = worker("w", "both", open_=4)
    with pytest.raises(Overloaded):
        choose(ASK, [full], {}, Estimate(), RULES, 0.0)
    assert choose(ASK, [full], {}, Estimate(), RULES, 0.0, urgent=True).worker is full
    free = worker("v", "both")
    assert choose(ASK, [full, free], {"w/1": 4000}, Estimate(), RULES, 0.0, urgent=True).worker is free


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
def test_one_prompt_and_one_choice(body: dict[str, Any], single: bool) -> None:
    assert Ask.read(json.dumps({"model": "m", **body}).encode()).single is single
