"""GrammarGuard survives grammars that end its child process."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bytelevel import EOS, VOCAB_SIZE, tokenizer_file

from emberline.core.errors import EngineUnavailable, InvalidRequest
from emberline.core.params import GrammarSpec
from emberline.engine import grammar_guard
from emberline.engine.grammar_guard import GrammarGuard, GrammarTrialProcess

FINE = GrammarSpec("json_object")
ENDLESS = GrammarSpec(
    "json_schema", json.dumps({"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrst"]})
)
RECURSIVE = GrammarSpec(
    "grammar", "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(9000)) + '\nr9000: "z"'
)


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarGuard]:
    process = GrammarTrialProcess(tokenizer_file(tmp_path_factory.mktemp("tokenizer")), VOCAB_SIZE, [EOS])
    process.start()
    guard = GrammarGuard(process)
    yield guard
    guard.close()


@pytest.mark.parametrize(("grammar", "says"), [(ENDLESS, "more than"), (RECURSIVE, "too deep")], ids=["hang", "crash"])
def test_grammar_that_ends_the_child_is_rejected_and_the_next_works(
    guard: GrammarGuard, grammar: GrammarSpec, says: str
) -> None:
    for _ in range(2):  # the second time the verdict is cached
        with pytest.raises(InvalidRequest, match=says) as caught:
            guard.check(grammar, param="text.format")
        assert caught.value.param == "text.format"
    guard.check(FINE)


def test_error_has_the_compilers_message(guard: GrammarGuard) -> None:
    with pytest.raises(InvalidRequest, match="uniqueItems") as caught:
        guard.check(GrammarSpec("json_schema", '{"type": "array", "uniqueItems": true}'), param="tools")
    assert caught.value.param == "tools" and caught.value.hint


def test_special_characters_are_passed_on(guard: GrammarGuard) -> None:
    guard.check(GrammarSpec("choice", json.dumps(["é\n", "\u2028", "\x00"])))
    with pytest.raises(InvalidRequest):
        guard.check(GrammarSpec("regex", "\ud800"))


def test_cached_verdicts_are_limited(guard: GrammarGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_guard, "MAX_CACHED_VERDICTS", 3)
    before = len(guard._verdicts)
    for i in range(10):
        guard.check(GrammarSpec("choice", json.dumps([f"w{i}"])))
    assert len(guard._verdicts) == max(before, 3)


def test_child_that_cannot_start_is_a_server_error(tmp_path: Path) -> None:
    guard = GrammarGuard(GrammarTrialProcess(tmp_path / "missing.json", VOCAB_SIZE, [EOS]))
    with pytest.raises(EngineUnavailable):
        guard.check(FINE)
    guard.close()


KILLED_ONCE = """
import os, pathlib, signal, sys
for line in sys.stdin:
    mark = pathlib.Path(sys.argv[1])
    if line.strip() and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), int(sys.argv[2]))
    print("null", flush=True)
"""


def process_with_script(tmp_path: Path, sign: signal.Signals) -> GrammarTrialProcess:
    process = GrammarTrialProcess(tmp_path, VOCAB_SIZE, [EOS])
    process._command = [sys.executable, "-c", KILLED_ONCE, str(tmp_path / "mark"), str(int(sign))]
    return process


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_child_is_a_server_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: signal.Signals) -> None:
    process = process_with_script(tmp_path, sign)
    process.start()
    monkeypatch.setattr(grammar_guard, "TRIAL_TIMEOUT_S", 20.0 if sign is signal.SIGKILL else 0.1)
    with ThreadPoolExecutor(1) as thread:
        try:
            with pytest.raises(EngineUnavailable, match="killed"):
                thread.submit(process.run, FINE).result(20)
        finally:
            if process._child is not None:
                process._child.kill()
    monkeypatch.undo()
    process.run(FINE)  # the exit status
    process.close()


def test_child_that_died_before_a_check_is_restarted(tmp_path: Path) -> None:
    process = process_with_script(tmp_path, signal.SIGKILL)
    process.start()
    child = process._child
    assert child is not None
    child.kill()
    child.wait()
    child.poll = lambda: None  # type: ignore[method-assign]  # a moment ago it lived
    with pytest.raises(EngineUnavailable, match="killed"):
        process.run(FINE)
    process.close()
