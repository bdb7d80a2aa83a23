"""generate_answers: makes the training data, the answers of the model itself to the prompts of a PromptSource."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams
from emberline.drafter.prompts import SEEDS_PER_ROUND, EmptyPrompts, PromptSource
from emberline.drafter.sequences import Answer, AnswerSet
from emberline.drafter.settings import GREEDY_AND_SAMPLED, TrainingSettings
from emberline.engine.llm import LLM

MAX_EMPTY_ROUNDS = 3  # rounds without a usable prompt after which generation ends
Report = Callable[[AnswerSet, float], None]  # gets the data so far and the tokens per second of the last round


def generate_answers(
    llm: LLM, source: PromptSource, settings: TrainingSettings, data: AnswerSet, report: Report
) -> None:
    """Add rounds of answers to `data` until it has `settings.tokens` tokens, or until there are no more prompts.

    Every round is determined by the seed and its number, and is stored when it is complete. Raise InvalidRequest if
    there is no usable prompt at all."""
    known = {tuple(each.tokens[: each.prompt_length].tolist()) for each in data.answers}
    empty_rounds = 0
    while data.answer_tokens < settings.tokens and empty_rounds < MAX_EMPTY_ROUNDS:
        began = time.perf_counter()
        if (prompts := source.next_round(data.rounds, known)) is None:
            break
        known.update(map(tuple, prompts))
        answers = _answer_prompts(llm, prompts, settings, data.rounds, isinstance(source, EmptyPrompts))
        empty_rounds = 0 if answers else empty_rounds + 1
        data.add_round(answers)
        tokens = sum(each.answer_length for each in answers)
        report(data, tokens / (time.perf_counter() - began))
    if not data.answers:
        hint = "use other --prompts, or raise --max-prompt"
        raise InvalidRequest("no prompt for training is usable: all are empty, repeated or too long", hint=hint)


def _answer_prompts(
    llm: LLM, prompts: list[list[int]], settings: TrainingSettings, round_number: int, samples_all: bool
) -> list[Answer]:
    """Return the model's answers; half of them are greedy, unless `samples_all`."""
    if not prompts:
        return []
    temperatures = [each for each in GREEDY_AND_SAMPLED if each or not samples_all]
    first = settings.seed + round_number * SEEDS_PER_ROUND + SEEDS_PER_ROUND // 2  # other seeds than the prompts'
    params = [
        SamplingParams(
            max_tokens=settings.max_answer, temperature=temperatures[index % len(temperatures)], seed=first + index
        )
        for index in range(len(prompts))
    ]
    completions = llm.generate(prompts, params)
    return [
        Answer(np.array(prompt + each.tokens, np.int32), len(prompt), chosen.temperature)
        for prompt, chosen, each in zip(prompts, params, completions, strict=True)
    ]
