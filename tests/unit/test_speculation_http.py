"""Results of `emberline bench speculation --http`, and the prompts that it sends."""

from __future__ import annotations

import json

import pytest

from emberline.bench import speculation_http, speculation_prompts
from emberline.bench.client import CompletionClient, RequestTrace
from emberline.bench.report import BenchReport
from emberline.bench.speculation import SpeculationPlan
from emberline.bench.speculation_http import HTTPPass
from emberline.core.errors import InvalidRequest


def make_pass(seconds: float, *tokens: int) -> HTTPPass:
    return HTTPPass(seconds, [RequestTrace(0.0, [0.1 * count], tokens=count) for count in tokens])


def test_passes_are_compared_with_the_same_pass_without_drafts() -> None:
    report = BenchReport("speculation-http")
    measured = {
        "off": [make_pass(2.0, 10, 20, 30), make_pass(1.0, 30)],
        "draft:m": [make_pass(1.0, 20, 40), make_pass(1.0, 90)],
    }
    speculation_http._add_results(report, "edits_1", measured)
    values = {name: result.value for name, result in report.results.items()}
    assert values["http_edits_1_off_cold"] == 30 and values["http_edits_1_off_warm"] == 30
    assert values["http_edits_1_draft_cold_speedup"] == 2 and values["http_edits_1_draft_warm_speedup"] == 3
    assert values["http_edits_1_off_cold_ttft"] == pytest.approx(2000)
    assert "http_edits_1_off_cold_speedup" not in values


def test_text_is_sent_as_it_is_and_may_end_early() -> None:
    client = CompletionClient("http://127.0.0.1:1/v1", "m", chat=True)
    body = json.loads(client._encode_request("why is the sky blue", 5))
    assert body["messages"] == [{"role": "user", "content": "why is the sky blue"}] and "ignore_eos" not in body
    assert json.loads(client._encode_request([1, 2, 3], 5))["ignore_eos"]


def test_questions_differ() -> None:
    assert len(set(speculation_prompts.make_questions(60))) == 60
    with pytest.raises(InvalidRequest, match="61 different questions are needed; there are 60"):
        speculation_prompts.make_questions(61)


def test_sets_with_a_grammar_are_refused() -> None:
    plan = SpeculationPlan(["calls"], ["suffix"], [1], 2, 10, 4, 1)
    with pytest.raises(InvalidRequest, match="sets has calls"):
        speculation_http.bench("m", plan, "cpu")
