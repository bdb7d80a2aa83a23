"""The engine in one's own process: grammars are followed, tried out elsewhere first, and compiled beside the loop; a
call that is broken off leaves it to the next; closed, it leaves nothing but its blocks."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from bytelevel import EOS, VOCAB_SIZE, tokenizer_file

from emberline import LLM, SamplingParams
from emberline.core.errors import EngineUnavailable, InvalidRequest
from emberline.core.params import Grammar
from emberline.core.request import Submission
from emberline.engine.grammar import GrammarCompiler

ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrst"]})
PATIENCE = 20.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    config = tiny.config("llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS)
    tokenizer_file(tiny.write(directory, config))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return directory


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, device="cpu", kv_memory=1 << 20) as made:
        yield made


def params(kind: Any, text: str) -> SamplingParams:
    return SamplingParams(max_tokens=12, temperature=0.0, grammar=Grammar(kind, text))


def test_a_grammar_is_followed(llm: LLM) -> None:
    for done in llm.generate(["one", "two"], params("regex", "[a-c]{3}x[0-9]+"), progress=False):
        assert re.fullmatch("[a-c]{3}x[0-9]+", done.text)


@pytest.mark.parametrize(("kind", "text"), [("json_schema", ENDLESS), ("regex", "(")])
def test_what_would_hang_or_fail_is_refused_before_the_engine_sees_it(llm: LLM, kind: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be used") as refused:
        llm.generate("one", params(kind, text), progress=False)
    assert refused.value.param == "grammar"
    assert llm.engine.idle
    assert llm.generate("one", params("choice", '["yes"]'), progress=False)[0].text == "yes"


def test_others_go_on_while_a_grammar_is_compiled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    may, build = threading.Event(), GrammarCompiler._build

    def slow(self: GrammarCompiler, grammar: Grammar, param: str) -> Any:
        assert may.wait(PATIENCE)
        return build(self, grammar, param)

    monkeypatch.setattr(GrammarCompiler, "_build", slow)
    engine, ended = llm.engine, []
    engine.add(Submission("slow", [1, 2, 3], params("choice", '["no", "never"]'), timeout=PATIENCE))
    engine.add(Submission("plain", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), timeout=PATIENCE))
    while "plain" not in ended:
        ended += [output.id for output in engine.step() if output.finish is not None]
    assert not engine.idle and not may.is_set()
    may.set()
    while not engine.idle:
        ended += [output.id for output in engine.step() if output.finish is not None]
    assert ended == ["plain", "slow"]


def test_a_call_that_is_broken_off_leaves_the_engine_to_the_next(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    alone = llm.generate("one", plain, progress=False)[0].tokens
    with pytest.raises(InvalidRequest, match="outside"):
        llm.generate(["two", [-1]], plain, progress=False)
    assert llm.generate("one", plain, progress=False)[0].tokens == alone

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm, "_take", interrupted)
        llm.generate(["two", "three"], plain, progress=False)
    llm.engine.step()
    assert llm.engine.idle
    assert llm.generate("one", plain, progress=False)[0].tokens == alone


def test_closed_it_leaves_nothing_but_its_blocks(directory: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "device": "cpu",
        "kv_memory": 1 << 20,
        "kv_disk": str(tmp_path),
        "kv_disk_size": 1 << 24,
    }
    asked, before = ([*range(3, 60)], params("choice", '["yes"]')), {*threading.enumerate()}
    with LLM(directory, **settings) as first:
        assert first.generate(*asked, progress=False)[0].cached_tokens == 0
        child = first._guard._child
    first.close()
    assert child is not None and child.returncode is not None
    assert not [one for one in threading.enumerate() if one not in before and one.name.endswith("_loop")]
    with pytest.raises(EngineUnavailable, match="closed"):
        first.generate(*asked)
    with LLM(directory, **settings) as second:
        assert second.generate(*asked, progress=False)[0].cached_tokens == 48
