"""The judge of benchmarks/quality/model_quality.py."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "quality"
QUESTIONS = json.loads((FOLDER / "questions.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("model_quality", FOLDER / "model_quality.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"content": None, "tool_calls": [{"function": {"name": name, "arguments": json.dumps(arguments)}}]}


def test_right_answers_are_right(bench: Any) -> None:
    for fact in QUESTIONS["facts"]:
        assert bench.judge(fact, {"content": f"It is {fact['any_of'][0].title()}."})
    for extraction in QUESTIONS["json"]:
        assert bench.judge(extraction, {"content": json.dumps(extraction["expected"])})
    for task in QUESTIONS["tools"]:
        assert bench.judge(task, call(task["name"], task["arguments"]))


def test_wrong_answers_are_wrong(bench: Any) -> None:
    assert not bench.judge(QUESTIONS["facts"][0], {"content": "The parish of Lyon"})
    assert not bench.judge(QUESTIONS["json"][0], {"content": '{"name": "Maria", "age": 35}'})
    for group in ("json", "tools"):
        assert not bench.judge(QUESTIONS[group][0], {"content": "no JSON"})
    weather = QUESTIONS["tools"][0]
    assert not bench.judge(weather, call("set_timer", weather["arguments"]))
    assert not bench.judge(weather, call(weather["name"], {"city": "Bern"}))
    twice = call(weather["name"], weather["arguments"])
    assert not bench.judge(weather, {**twice, "tool_calls": twice["tool_calls"] * 2})


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds.", True),
        ("```python\ndef add(a, b):\n    return a - b\n```", False),
        ("def add(a, b):\n    return a + b", True),
        ("Just use +.", False),
    ],
)
def test_functions_are_judged_by_their_tests(bench: Any, answer: str, right: bool) -> None:
    task = next(task for task in QUESTIONS["instructions_and_code"] if "add(a, b)" in task["question"])
    assert bench.judge(task, {"content": answer}) is right
