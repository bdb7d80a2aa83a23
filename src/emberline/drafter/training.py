"""train_drafter: generates training data with a model, trains an EAGLE-3 head on it, and measures its acceptance."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from emberline.core.cpus import core_count
from emberline.core.errors import InvalidRequest
from emberline.drafter.checkpoint import read_head, write_head
from emberline.drafter.generation import generate_answers
from emberline.drafter.plan import TrainingPlan
from emberline.drafter.progress import TrainingProgress
from emberline.drafter.prompts import choose_prompt_source
from emberline.drafter.report import DRAFT_LENGTH, measure_acceptance
from emberline.drafter.run_directory import RunDirectory
from emberline.drafter.sequences import Answer, AnswerSet
from emberline.drafter.stop_signal import StopSignal
from emberline.drafter.target import TargetStates
from emberline.drafter.trainer import HeadTrainer
from emberline.drafter.vocabulary import DraftVocabulary
from emberline.engine.llm import LLM
from emberline.models.decoder import DecoderModel


def train_drafter(
    model: str, plan: TrainingPlan, run: RunDirectory, progress: TrainingProgress, save_steps: int
) -> dict[str, Any]:
    """Train a head for a model, or continue an interrupted run, and return its acceptance report.

    `model`: a name that `emberline pull` accepts. `save_steps`: steps between two saves of the training state. Raise
    KeyboardInterrupt after a signal to stop, when the state is saved."""
    with LLM(model, **plan.engine_settings) as llm:
        target_model = llm.engine.runner.model  # type: ignore[attr-defined]
        run.begin(model, target_model.fingerprint, plan.settings.to_json())
        if (report := run.load_report()) is not None:
            progress.write_line(f"training in {run.path} is complete")
            return report
        began = time.perf_counter()
        data = AnswerSet(run.data)
        source = choose_prompt_source(llm, plan.settings, plan.first_token)
        generate_answers(llm, source, plan.settings, data, lambda *facts: _show_data(progress, plan, *facts))
        generated = time.perf_counter()
        with _all_torch_threads():
            report = _train(target_model, plan, run, data, progress, save_steps)
        report["seconds"] = {
            "data": round(generated - began, 1),
            "training": round(time.perf_counter() - generated, 1),
        }
        run.finish(report)
        return report


@contextmanager
def _all_torch_threads() -> Iterator[None]:
    """Let torch use all cores, because an engine on a CPU leaves it only one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(core_count())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _show_data(progress: TrainingProgress, plan: TrainingPlan, data: AnswerSet, tokens_per_second: float) -> None:
    tokens, wanted = data.answer_tokens, plan.settings.tokens
    left = max(0, wanted - tokens) / max(tokens_per_second, 1e-9)
    progress.write_line(
        f"data: {tokens:,}/{wanted:,} tokens in {len(data.answers):,} answers  {tokens_per_second:,.0f} tok/s"
        f"  {int(left) // 60}:{int(left) % 60:02} left"
    )


def _train(
    model: DecoderModel,
    plan: TrainingPlan,
    run: RunDirectory,
    data: AnswerSet,
    progress: TrainingProgress,
    save_steps: int,
) -> dict[str, Any]:
    settings = plan.settings
    answers, held_out = data.split_held_out(max(settings.passes, DRAFT_LENGTH) + 2)
    if not answers or not held_out:
        message = f"the data has {len(data.answers)} answers, too few or too short ones for training"
        raise InvalidRequest(message, param="tokens", hint="raise --tokens and choose another --out")
    vocabulary = DraftVocabulary.choose(answers, plan.model.vocab, settings.draft_vocab, plan.model.eos)
    target = TargetStates(model, plan.head.layer_ids, settings.max_length)
    trainer = HeadTrainer(plan.head, target, answers, vocabulary, settings)
    if (state := run.load_state(target.device)) is not None:
        trainer.load_state(state)
        progress.write_line(f"training continues at step {trainer.step} of {trainer.total_steps}")
    _run_steps(trainer, run, progress, save_steps)
    write_head(run.path, trainer.head, vocabulary)
    return _measure_stored_head(run, target, held_out, plan) | {"steps": trainer.step, "tokens": data.answer_tokens}


def _run_steps(trainer: HeadTrainer, run: RunDirectory, progress: TrainingProgress, save_steps: int) -> None:
    progress.start_steps(trainer.step)
    with StopSignal() as stop:
        while trainer.step < trainer.total_steps:
            metrics = trainer.run_step()
            progress.show_step(trainer.step, trainer.total_steps, metrics.tokens, metrics.read)
            if stop.is_requested or trainer.step % save_steps == 0 or trainer.step == trainer.total_steps:
                run.save_state(trainer.state())
            if stop.is_requested and trainer.step < trainer.total_steps:
                progress.write_line(f"training stopped and saved at step {trainer.step} of {trainer.total_steps}")
                raise KeyboardInterrupt
    progress.close()


def _measure_stored_head(
    run: RunDirectory, target: TargetStates, held_out: list[Answer], plan: TrainingPlan
) -> dict[str, Any]:
    """Measure the acceptance of the head as it was stored, with weights rounded to bfloat16."""
    head, vocabulary = read_head(run.path)
    assert head.config == plan.head
    return measure_acceptance(head.to(target.device), vocabulary, target, held_out, plan.settings.batch_tokens)
