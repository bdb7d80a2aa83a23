"""`emberline drafter train`: data, training that continues where it was interrupted, the report and errors."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from bytelevel import EOS, VOCAB_SIZE, encode, tokenizer_file

from emberline.cli.__main__ import main
from emberline.core.params import SamplingParams
from emberline.drafter.batches import make_batch, make_reducer, order_batches
from emberline.drafter.checkpoint import read_head
from emberline.drafter.head_config import HeadConfig
from emberline.drafter.report import acceptance_length, measure_acceptance
from emberline.drafter.sequences import Answer, AnswerSet
from emberline.drafter.settings import TrainingSettings
from emberline.drafter.target import TargetStates
from emberline.drafter.trainer import HeadTrainer
from emberline.drafter.vocabulary import DraftVocabulary
from emberline.engine.llm import LLM
from emberline.models.loader import load_decoder

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
SMALL = ["--max-prompt=24", "--max-answer=20", "--passes=3", "--draft-vocab=64", "--batch-tokens=128", "--quiet"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer_file(tiny.write(directory, tiny.config("llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS)))
    return directory


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat")
    tokenizer_file(tiny.write(directory, tiny.config("llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS)))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def train(model: Path, out: Path, *options: str) -> int:
    return main(["drafter", "train", str(model), "--out", str(out), *SMALL, *options])


def test_interrupted_training_gives_the_same_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tokens=900", "--epochs=2", "--round-prompts=16", "--seed=7"]
    assert train(model, tmp_path / "whole", *options) == 0
    printed = capsys.readouterr().out
    assert "tokens/step" in printed and str(tmp_path / "whole") in printed

    add_round, run_step = AnswerSet.add_round, HeadTrainer.run_step

    def interrupt_in_second_round(data: AnswerSet, answers: list[Answer]) -> None:
        if data.rounds == 1:
            raise KeyboardInterrupt
        add_round(data, answers)

    def interrupt_at_step_4(trainer: HeadTrainer) -> object:
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return run_step(trainer)

    monkeypatch.setattr(AnswerSet, "add_round", interrupt_in_second_round)
    assert train(model, tmp_path / "parts", *options) == 130
    assert len(list((tmp_path / "parts/data").iterdir())) == 1
    monkeypatch.setattr(AnswerSet, "add_round", add_round)
    monkeypatch.setattr(HeadTrainer, "run_step", interrupt_at_step_4)
    assert train(model, tmp_path / "parts", "--save-steps=100") == 130
    state = torch.load(tmp_path / "parts/state.pt", weights_only=True)
    assert state["step"] == 5 and not (tmp_path / "parts/report.json").exists()
    monkeypatch.setattr(HeadTrainer, "run_step", run_step)
    assert train(model, tmp_path / "parts", "--seed=7") == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    reports = [json.loads((tmp_path / each / "report.json").read_text()) for each in ("whole", "parts")]
    assert reports[0]["answers"] == reports[1]["answers"] and reports[0]["steps"] > 5
    assert not (tmp_path / "parts/state.pt").exists()
    capsys.readouterr()
    assert train(model, tmp_path / "parts") == 0  # a complete run is only reported
    assert "tokens/step" in capsys.readouterr().out


def test_prompts_of_a_file_are_answered(chat_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"Tell {n}"}]} for n in range(8)]
    lines += [{"prompt": "once upon"}, {"prompt": "x" * 200}, lines[0]]
    lines += [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "no"}]}]
    prompts.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert train(chat_model, out, f"--prompts={prompts}", "--epochs=1", "--max-steps=2", "--round-prompts=5") == 0
    answers = AnswerSet(out / "data").answers
    texts = [tuple(each.tokens[: each.prompt_length].tolist()) for each in answers]
    assert len(answers) == 10 and len(set(texts)) == 10
    assert answers[0].tokens[: answers[0].prompt_length].tolist() == encode("<user>Tell 0<a>")
    assert answers[-1].tokens[: answers[-1].prompt_length].tolist() == encode("<user>Hi<a>")
    assert {each.temperature for each in answers} == {0.0, np.float32(0.7), 1.0}
    assert read_head(out)[1].t2d[EOS]


def test_model_makes_up_messages(chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, asked = LLM.generate, []

    def end_every_message(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], **kw: object) -> object:
        completions = generate(llm, prompts, params)
        if params[0].max_tokens != 20:  # not answers
            asked.extend(prompts)
            for number, each in enumerate(completions):
                each.finish_reason, each.text = "stop", f" message {number // 2} "
        return completions

    monkeypatch.setattr(LLM, "generate", end_every_message)
    assert train(chat_model, tmp_path, "--tokens=60", "--epochs=1", "--max-steps=2", "--round-prompts=12") == 0
    assert asked == [encode("<user>")] * 12
    answers = AnswerSet(tmp_path / "data").answers
    wanted = [encode(f"<user>message {number}<a>") for number in range(6)]
    assert [each.tokens[: each.prompt_length].tolist() for each in answers] == wanted


def test_overfitting_raises_acceptance(tmp_path: Path) -> None:
    decoder = load_decoder(tiny.write(tmp_path, "llama"), "float32")
    random = np.random.default_rng(3)
    answers = [Answer(random.integers(0, 131, 40).astype(np.int32), 6, 0.0) for _ in range(2)] * 2
    settings = TrainingSettings(
        max_prompt=8, max_answer=40, draft_vocab=131, epochs=80, batch_tokens=160, passes=4, learning_rate=5e-3
    )
    vocabulary = DraftVocabulary.choose(answers, 131, 131, [2])
    head_config = HeadConfig.for_model(decoder.config, 131)
    target = TargetStates(decoder, head_config.layer_ids, 64)
    trainer = HeadTrainer(head_config, target, _with_target_tokens(answers, target), vocabulary, settings)
    first = trainer.run_step().read()[0]
    while trainer.step < trainer.total_steps:
        metrics = trainer.run_step()
    assert metrics.read()[0] < first
    report = measure_acceptance(trainer.head, vocabulary, target, trainer._answers, 160)["answers"]["greedy"]
    assert min(report["acceptance"]) > 0.8 and report["acceptance_length"] > 3, report
    assert report["drafts"] == 4 * (40 - 6 - 4)
    assert 1 < report["tokens_per_step"] <= 5


def _with_target_tokens(answers: list[Answer], target: TargetStates) -> list[Answer]:
    """Replace the answers by the target's greedy ones."""
    out = []
    for each in answers:
        tokens = each.tokens.copy()
        for position in range(each.prompt_length, len(tokens)):
            ((_, logits),) = target.compute([tokens[:position]], [range(position - 1, position)])
            tokens[position] = int(logits.argmax())
        out.append(Answer(tokens, each.prompt_length, 0.0))
    return out


def test_rows_of_passes(tmp_path: Path) -> None:
    decoder = load_decoder(tiny.write(tmp_path, "llama"), "float32")
    target = TargetStates(decoder, (0, 1, 2), 64)
    answers = [Answer(np.arange(20, 20 + size, dtype=np.int32), prompt, 0.0) for size, prompt in ((9, 3), (12, 7))]
    vocabulary = DraftVocabulary(np.arange(0, 131, 2), 131)
    batch = make_batch(answers, target, 3, make_reducer(vocabulary, target.device))
    assert batch.hidden.shape == (2, 12, 3 * 48) and batch.probabilities is not None
    assert batch.probabilities.shape == (5 + 4, 66) and torch.allclose(batch.probabilities.sum(1), torch.ones(9))
    for number, rows in enumerate(batch.passes):
        for draft, row in zip(rows.drafts.tolist(), rows.targets.tolist(), strict=True):
            answer, root = answers[draft // 12], draft % 12
            assert root >= answer.prompt_length - 1
            assert batch.next_tokens[row] == answer.tokens[root + 2 + number]
        assert len(rows.drafts) == 9 - 2 * number


def test_batches_hold_every_answer_once() -> None:
    answers = [Answer(np.zeros(size, np.int32), 1, 0.0) for size in range(10, 60)]
    for epoch in (0, 1):
        batches = order_batches(answers, 200, 5, epoch)
        assert sorted(index for each in batches for index in each) == list(range(50))
        assert all(len(each) * max(10 + index for index in each) <= 200 for each in batches)
    assert order_batches(answers, 200, 5, 0) != order_batches(answers, 200, 5, 1)
    assert order_batches(answers, 200, 5, 1) == order_batches(answers, 200, 5, 1)


def test_vocabulary_has_frequent_and_end_tokens() -> None:
    answers = [Answer(np.array([9, 9, 4, 4, 7, 4, 5]), 2, 0.0)]
    chosen = DraftVocabulary.choose(answers, 12, 3, [11])
    assert chosen.ids.tolist() == [4, 5, 11] and chosen.d2t.tolist() == [4, 4, 9]
    assert chosen.covered_share(answers) == 0.8
    assert DraftVocabulary.choose(answers, 12, 6, [11]).ids.tolist() == [0, 1, 4, 5, 7, 11]


def test_acceptance_length() -> None:
    assert acceptance_length([0.5, 0.5, 0.0]) == 1.75


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed=8"], "seed is 8, but the training in {out} was started with 0 (hint: drop --seed"),
        (["--passes=4"], "passes is 4, but"),
    ],
)
def test_other_settings_are_refused(
    options: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["--tokens=200", "--round-prompts=12", "--epochs=1", "--max-steps=1"]
    assert train(model, tmp_path, *start) == 0
    assert train(model, tmp_path, *options) == 1
    assert message.format(out=tmp_path) in capsys.readouterr().err


def test_other_models_are_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    start = ["--tokens=200", "--round-prompts=12", "--epochs=1", "--max-steps=1"]
    assert train(model, out, *start) == 0
    tokenizer_file(tiny.write(other, tiny.config("llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS), seed=1))
    assert train(other, out) == 1
    error = capsys.readouterr().err
    assert f"the model is {other}, but the training in {out} was started with {model}" in error and "--out" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-answer=64"], "must be at most the model's context, 64"),
        (["--draft-vocab=1000"], "draft_vocab is 1000; it must be at most"),
        (["--learning-rate=0"], "learning_rate is 0.0; it must be above 0"),
        (["--passes=0"], "passes is 0; it must be at least 1"),
        (["--save-steps=0"], "save_steps is 0; it must be at least 1"),
        (["--prompts=/no/such.jsonl"], "cannot read the prompts in /no/such.jsonl"),
        (["--prompts={bad}"], "line 2: must be a JSON object"),
        (["--prompts={untyped}"], "line 1: must have a text prompt or a list messages"),
        (["--prompts={messages}"], "the model has no chat template"),
        (["--prompts={long}"], "no prompt for training is usable"),
        (["--out={used}"], "no training.json of an earlier training"),
    ],
)
def test_bad_inputs(
    options: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {
        "bad": '{"prompt": "a"}\n[]\n',
        "untyped": '{"prompt": 3}\n',
        "messages": '{"messages": [{"role": "user", "content": "a"}]}\n',
        "long": json.dumps({"prompt": "x" * 100}) + "\n",
    }
    files = {name: tmp_path / f"{name}.jsonl" for name in texts}
    for name, text in texts.items():
        files[name].write_text(text)
    assert train(model, tmp_path / "out", *(each.format(**files, used=tmp_path) for each in options)) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("emberline: ")


def test_dry_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(model, tmp_path / "out", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "4,000,000 tokens of answers" in shown and "layers 0, 1, 2" in shown and "64 of 260 tokens" in shown
    assert not (tmp_path / "out").exists()


def test_damaged_data_and_state(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["--tokens=200", "--round-prompts=12", "--epochs=1", "--max-steps=1"]
    assert train(model, tmp_path, *start) == 0
    (tmp_path / "report.json").unlink()
    (tmp_path / "state.pt").write_bytes(b"damaged")
    assert train(model, tmp_path) == 1
    assert "state.pt is damaged" in capsys.readouterr().err
    (tmp_path / "data/answers-00000.npz").write_bytes(b"damaged")
    assert train(model, tmp_path) == 1
    assert "is not a file of training answers" in capsys.readouterr().err
