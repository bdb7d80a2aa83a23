"""The id of a request that has ended may be used again once no running step computes it."""

from __future__ import annotations

import pytest

from emberline.core.engine_config import SchedulerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.fake import FakePipelinedRunner, FakeRunner

CONFIG = SchedulerConfig(max_running=4, block_size=16, max_batch_tokens=64)


def submission(name: str, tokens: int = 40) -> Submission:
    return Submission(name, [1, 2, 3], SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))


def test_id_is_refused_while_a_running_step_computes_it() -> None:
    engine = Engine(CONFIG, FakePipelinedRunner(64, 16))
    engine.add(submission("a"))
    engine.add(submission("b"))
    for _ in range(3):
        engine.step()
    with pytest.raises(InvalidRequest, match="already open"):
        engine.add(submission("a"))
    engine.abort("a")
    assert [output.id for output in engine.step() if output.finish is not None] == ["a"]
    with pytest.raises(InvalidRequest, match="a running step still computes it"):
        engine.add(submission("a"))
    engine.step()
    engine.step()
    engine.add(submission("a", tokens=5))
    outputs = []
    while not engine.idle:
        outputs += engine.step()
    tokens = [token for output in outputs if output.id == "a" for token in output.tokens]
    alone = Engine(CONFIG, FakePipelinedRunner(64, 16))
    alone.add(submission("a", tokens=5))
    expected = []
    while not alone.idle:
        expected += [token for output in alone.step() for token in output.tokens]
    assert tokens == expected and len(tokens) == 5


def test_id_is_free_at_once_without_running_steps() -> None:
    engine = Engine(CONFIG, FakeRunner(64, 16))
    engine.add(submission("a"))
    engine.step()
    engine.abort("a")
    engine.step()
    engine.add(submission("a"))
