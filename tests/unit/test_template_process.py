"""TemplateProcess: hostile templates end with a clear error, in a child process that can be killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from hostile_templates import build_hostile_templates

from emberline.core.errors import EmberlineError, EngineUnavailable, InvalidRequest, ModelFileError
from emberline.core.offload import OffloadProcess
from emberline.tokens import template as module
from emberline.tokens import template_process
from emberline.tokens.render_budget import RenderBudget
from emberline.tokens.template import MAX_ERROR_CHARS, ChatTemplate
from emberline.tokens.template_process import TemplateProcess

USER = {"role": "user", "content": "Hi there"}
SMALL_BUDGET = 4_000_000  # an eighth of the usual one, so that the test is fast


def render_with_small_budget(source: str) -> str:
    """Runs in a child process."""
    module.RenderBudget = lambda: RenderBudget(SMALL_BUDGET)  # type: ignore[misc,assignment]
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render([USER])


@pytest.fixture
def tests_importable_in_children(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@pytest.mark.usefixtures("tests_importable_in_children")
def test_hostile_templates_exceed_their_budget_or_are_rejected() -> None:
    """Their cost is charged in advance: none needs the limits of the child process."""
    child = OffloadProcess("hostile", memory_bytes=template_process.MEMORY_BYTES)
    templates, endings = build_hostile_templates(), {}
    for name, source in templates.items():
        try:
            endings[name] = f"rendered {child.call(render_with_small_budget, source)[:100]}"
        except (ModelFileError, InvalidRequest) as error:
            assert len(error.message) < MAX_ERROR_CHARS + 200
            endings[name] = "MemoryError" if "MemoryError" in error.message else ""
        except Exception as error:
            endings[name] = f"{type(error).__name__}: {error}"
    child.close()
    assert len(templates) > 200 and {name: ending for name, ending in endings.items() if ending} == {}


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(ChatTemplate({"default": "{{ bos_token }}{{ messages[0].content }}"}, {"bos_token": "<s>"}))
    yield made
    made.close()


def test_child_renders_like_the_template_itself(process: TemplateProcess) -> None:
    assert process.render([USER]) == "<s>Hi there"
    clock = "{{ strftime_now('%Y') }}{{ mood }}{{ tools[0] }}{{ add_generation_prompt }}"
    other = TemplateProcess(ChatTemplate({"default": clock}, {}))
    rendered = other.render([USER], [{"a": 1}], False, mood="!", strftime_now=datetime(2024, 7, 5).strftime)
    assert rendered == "2024!{'a': 1}False"
    other.close()


def test_errors_of_the_template_are_passed_on(process: TemplateProcess) -> None:
    with pytest.raises(InvalidRequest) as caught:
        process.render([])
    assert caught.value.param == "messages"


def test_template_that_uses_too_much_cpu_time_is_ended(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function stands for an operation whose cost is not charged."""
    monkeypatch.setattr(process._process, "_cpu_seconds", 0.2)
    with pytest.raises(ModelFileError, match=r"more than the limit of 0\.2 s of CPU time") as caught:
        process._process.call(sum, range(10**12))
    assert caught.value.hint is not None and "--chat-template" in caught.value.hint
    monkeypatch.undo()
    assert process.render([USER]) == "<s>Hi there"


@pytest.mark.parametrize(
    ("sign", "error"), [(signal.SIGSEGV, ModelFileError), (signal.SIGKILL, EngineUnavailable)], ids=["crash", "kill"]
)
def test_child_that_ended_is_started_again(
    process: TemplateProcess, sign: signal.Signals, error: type[EmberlineError]
) -> None:
    with pytest.raises(error):
        process._process.call(signal.raise_signal, sign)
    assert process.render([USER]) == "<s>Hi there"


def test_child_that_hangs_is_killed(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.render([USER])
    monkeypatch.setattr(process._process, "_wall_seconds", 0.1)
    with pytest.raises(EngineUnavailable, match="killed"):
        process._process.call(signal.raise_signal, signal.SIGSTOP)
    monkeypatch.undo()
    assert process.render([USER]) == "<s>Hi there"
