"""LLM in the calling process: grammars are checked first and compiled in a thread, and interrupted calls clean up."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from bytelevel import EOS, VOCAB_SIZE, tokenizer_file

from emberline import LLM, SamplingParams
from emberline.core.errors import EngineUnavailable, InvalidRequest, Overloaded, UnsupportedModel
from emberline.core.params import GrammarSpec
from emberline.core.request import Submission
from emberline.engine.grammar import GrammarCompiler

ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrst"]})
TIMEOUT_S = 20.0


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
    return SamplingParams(max_tokens=12, temperature=0.0, grammar=GrammarSpec(kind, text))


def test_output_matches_the_grammar(llm: LLM) -> None:
    for done in llm.generate(["one", "two"], params("regex", "[a-c]{3}x[0-9]+"), progress=False):
        assert re.fullmatch("[a-c]{3}x[0-9]+", done.text)


@pytest.mark.parametrize(("kind", "text"), [("json_schema", ENDLESS), ("regex", "(")])
def test_dangerous_grammar_is_rejected_before_the_engine(llm: LLM, kind: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be used") as refused:
        llm.generate("one", params(kind, text), progress=False)
    assert refused.value.param == "grammar"
    assert llm.engine.idle
    assert llm.generate("one", params("choice", '["yes"]'), progress=False)[0].text == "yes"


def test_other_requests_run_while_a_grammar_is_compiled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    may, build = threading.Event(), GrammarCompiler._compile_uncached

    def slow(self: GrammarCompiler, grammar: GrammarSpec, param: str) -> Any:
        assert may.wait(TIMEOUT_S)
        return build(self, grammar, param)

    monkeypatch.setattr(GrammarCompiler, "_compile_uncached", slow)
    engine, ended = llm.engine, []
    engine.add(Submission("slow", [1, 2, 3], params("choice", '["no", "never"]'), timeout=TIMEOUT_S))
    engine.add(Submission("plain", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), timeout=TIMEOUT_S))
    while "plain" not in ended:
        ended += [output.id for output in engine.step() if output.finish is not None]
    assert not engine.idle and not may.is_set()
    may.set()
    while not engine.idle:
        ended += [output.id for output in engine.step() if output.finish is not None]
    assert ended == ["plain", "slow"]


def test_interrupted_call_does_not_disturb_the_next(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    alone = llm.generate("one", plain, progress=False)[0].tokens
    with pytest.raises(InvalidRequest, match="token ids in"):
        llm.generate(["two", [-1]], plain, progress=False)
    assert llm.generate("one", plain, progress=False)[0].tokens == alone

    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm, "_apply_output", raise_interrupt)
        llm.generate(["two", "three"], plain, progress=False)
    llm.engine.step()
    assert llm.engine.idle
    assert llm.generate("one", plain, progress=False)[0].tokens == alone


def test_batch_may_be_larger_than_the_queue(directory: Path, llm: LLM) -> None:
    prompts, plain = [f"{i}" for i in range(8)], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, n=2)
    with LLM(directory, device="cpu", kv_memory=1 << 20, max_running=1, max_waiting=1) as small:
        done = small.generate(prompts, plain, progress=False)
        assert small.engine.idle
    assert [(c.prompt, c.index) for c in done] == [(i, n) for i in range(8) for n in range(2)]
    assert [c.tokens for c in done] == [c.tokens for c in llm.generate(prompts, plain, progress=False)]


def test_submission_beyond_any_queue_is_rejected(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise Overloaded("full")

    monkeypatch.setattr(llm.engine, "add", full)
    with pytest.raises(Overloaded):
        llm.generate("one", progress=False)


def test_model_without_chat_template_completes_prompts(tmp_path: Path) -> None:
    tokenizer_file(tiny.write(tmp_path, tiny.config("llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS)))
    with LLM(tmp_path, device="cpu", kv_memory=1 << 20) as bare:
        assert bare.generate("one", SamplingParams(max_tokens=3, ignore_eos=True), progress=False)[0].tokens
        with pytest.raises(UnsupportedModel, match="no chat template"):
            bare.chat([{"role": "user", "content": "one"}])


def test_min_tokens_precede_stop_strings(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=8, min_tokens=8, temperature=0.0, ignore_eos=True)
    text = llm.generate("one", plain, progress=False)[0].text
    assert llm.generate("one", replace(plain, stop=(text[2],)), progress=False)[0].text == text
    sooner = llm.generate("one", replace(plain, stop=(text[2],), min_tokens=0), progress=False)[0]
    assert sooner.text == text[:2] and sooner.finish_reason == "stop"


def test_close_leaves_only_stored_blocks(directory: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "device": "cpu",
        "kv_memory": 1 << 20,
        "kv_disk": str(tmp_path),
        "kv_disk_size": 1 << 24,
    }
    asked, before = ([*range(3, 60)], params("choice", '["yes"]')), {*threading.enumerate()}
    with LLM(directory, **settings) as first:
        assert first.generate(*asked, progress=False)[0].cached_tokens == 0
        child = first._guard._process._child
    first.close()
    assert child is not None and child.returncode is not None
    assert not [one for one in threading.enumerate() if one not in before and one.name.endswith("_loop")]
    with pytest.raises(EngineUnavailable, match="closed"):
        first.generate(*asked)
    with LLM(directory, **settings) as second:
        assert second.generate(*asked, progress=False)[0].cached_tokens == 48
