"""OpenAI's field `prediction`: validated, tokenized for engines that draft tokens, and drafted from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_engine import WorkerHarness
from test_speculation import make_engine, run, submission, texts

from emberline.api.fields import IGNORED_FIELDS_HEADER
from emberline.api.openai import chat
from emberline.core.errors import ContextLengthExceeded, InvalidRequest
from emberline.core.params import SamplingParams
from emberline.core.request import Request, Submission
from emberline.engine.speculation.drafter import Drafter
from emberline.engine.speculation.ngram import NgramProposer
from emberline.engine.speculation.prediction import PredictionProposer
from emberline.engine.speculation.proposer import Proposal
from emberline.worker.protocols import parse_large_body

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


def parse(prediction: Any) -> str | None:
    return chat.parse(json.dumps({**CHAT, "prediction": prediction}).encode()).prediction


def test_prediction_is_text_or_text_parts() -> None:
    assert parse({"type": "content", "content": "abc"}) == "abc"
    parts = [{"type": "text", "text": "ab\n"}, {"type": "text", "text": "c"}]
    assert parse({"type": "content", "content": parts}) == "ab\nc"
    assert parse({"type": "content", "content": ""}) == ""
    assert parse(None) is None


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("abc", "prediction"),
        ({}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": 3}, "prediction.content"),
        ({"type": "content", "content": []}, "prediction.content"),
        ({"type": "content", "content": ["a"]}, "prediction.content[0]"),
        ({"type": "content", "content": [{"type": "image_url", "text": "a"}]}, "prediction.content[0].type"),
    ],
)
def test_wrong_prediction_is_rejected_by_name(prediction: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(prediction)
    assert caught.value.param == param and param.partition(".")[0] in caught.value.message
    for speculates in (False, True):
        answer = WorkerHarness(script, speculates=speculates).post(PATH, {**CHAT, "prediction": prediction})
        assert answer.status == 400 and answer.json["error"]["param"] == param


def script(before: str, index: int) -> str:
    return before + "abcdefgh"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("content", ["abc", ""])
def test_prediction_is_ignored_without_speculation(content: str, stream: bool) -> None:
    body = {**CHAT, "prediction": {"type": "content", "content": content}, "stream": stream}
    off, on = WorkerHarness(script), WorkerHarness(script, speculates=True)
    assert off.post(PATH, body).headers[IGNORED_FIELDS_HEADER] == "prediction"
    assert IGNORED_FIELDS_HEADER not in on.post(PATH, body).headers
    assert off.engine.submissions[0].prediction == ()
    assert on.engine.submissions[0].prediction == tuple(on.tokenizer.encode(content, add_special=False))


def test_prediction_longer_than_the_context_is_rejected() -> None:
    worker = WorkerHarness(script, speculates=True)
    for size in (4000, 4000 * 128 + 1):
        answer = worker.post(PATH, {**CHAT, "prediction": {"type": "content", "content": "a" * size}})
        assert answer.status == 400
        error = answer.json["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prediction.content")
    body = json.dumps({**CHAT, "prediction": {"type": "content", "content": "a" * 20_000}}).encode()
    assert parse_large_body(PATH, body, {"m": 4000}).messages  # type: ignore[union-attr]
    with pytest.raises(ContextLengthExceeded) as caught:
        parse_large_body(PATH, body, {"m": 100})
    assert caught.value.param == "prediction.content"


def test_usage_sums_drafts_of_all_choices() -> None:
    worker = WorkerHarness(script)
    worker.engine.drafted, worker.engine.accepted = 5, 3
    for path, body in ((PATH, CHAT), ("/v1/completions", {"prompt": "hi"})):
        for fields, choices in (({}, 1), ({"n": 2}, 2), ({"n": 2, "stop": "h"}, 2)):
            details = worker.post(path, {**body, **fields}).json["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] == 3 * choices
            assert details["rejected_prediction_tokens"] == 2 * choices
    worker.engine.drafted, worker.engine.accepted = 50, 40  # most of them after the stop string
    usage = worker.post(PATH, {**CHAT, "stop": "c"}).json["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == usage["completion_tokens"] < 8
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] == 50 - usage["completion_tokens"]


def test_usage_without_speculation_has_zeros() -> None:
    details = WorkerHarness(script).post(PATH, CHAT).json["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


# -- drafts ----------------------------------------------------------------------------------------------------------


def request_with(prediction: list[int], prompt: list[int], output: list[int]) -> Request:
    e = make_engine(None)
    e.add(Submission("x", prompt, SamplingParams(), prediction=tuple(prediction)))
    request = e.scheduler.requests["x#0"]
    request.tokens += output
    return request


def test_prediction_is_continued_while_it_is_the_output() -> None:
    proposer = PredictionProposer()
    request = request_with([5, 6, 7, 8], [1, 2], [])
    assert proposer.propose(request, 3).tokens == (5, 6, 7)
    request.tokens += [5, 6]
    assert proposer.propose(request, 3) == Proposal((7, 8), [0.8, 0.8])
    request.tokens.append(9)
    assert not proposer.propose(request, 3).tokens
    request.tokens += [8]
    assert not proposer.propose(request, 3).tokens
    proposer.forget(request)
    assert not proposer.propose(request_with([], [1], []), 3).tokens
    assert not proposer.propose(request_with([5], [1], [5]), 3).tokens
    assert not proposer.propose(request_with([5], [1], [5, 5]), 3).tokens


def test_ngram_returns_to_the_prediction() -> None:
    def propose(prediction: list[int], prompt: list[int], output: list[int], limit: int = 3) -> list[int]:
        return list(NgramProposer().propose(request_with(prediction, prompt, output), limit).tokens)

    assert propose([5, 6, 7, 8, 9], [1, 2], [0, 6, 7]) == [8, 9]
    assert propose([5, 6, 7, 8, 9], [1, 2], [0, 5, 6], 2) == [7, 8]
    assert propose([5, 6, 7], [1, 2], [6, 7]) == []
    assert propose([5, 6, 7], [3], [4, 3]) == []
    assert propose([5, 6, 7, 8], [6, 7, 4], [6, 7]) == [4, 6, 7]  # the request's own tokens are newer


def test_right_and_wrong_predictions_change_only_the_number_of_steps() -> None:
    alone = make_engine(None)
    alone.add(submission("a", max_tokens=40, temperature=0.0))
    expected = texts(run(alone))
    steps = {}
    for name, prediction in (("right", expected["a", 0]), ("wrong", [999] * 40), ("none", [])):
        e = make_engine(Drafter([PredictionProposer()], 4, adaptive=False))
        one = submission("a", max_tokens=40, temperature=0.0)
        e.add(Submission(one.id, one.prompt, one.params, prediction=tuple(prediction)))
        outputs = run(e)
        assert texts(outputs) == expected
        steps[name] = e.runner.steps  # type: ignore[attr-defined]
        assert (sum(o.accepted_tokens for o in outputs) > 25) == (name == "right")
    assert steps["right"] < 12 < steps["wrong"] <= steps["none"]


def test_prediction_outside_the_vocabulary_is_rejected() -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_engine(None).add(Submission("x", [1], SamplingParams(), prediction=(1 << 20,)))
    assert caught.value.param == "prediction"
