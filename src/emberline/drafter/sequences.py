"""AnswerSet: prompts with the model's answers as token ids, stored in files of one generation round each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from emberline.core.errors import ModelFileError

HELD_OUT_STRIDE = 51  # every 51st answer is used for the report only; odd, since temperatures repeat every 4 answers
MAX_HELD_OUT_SEQUENCES = 400
ARRAY_NAMES = ("tokens", "ends", "prompt_lengths", "temperatures")


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: np.ndarray  # int32: prompt, then answer
    prompt_length: int
    temperature: float

    @property
    def answer_length(self) -> int:
        return len(self.tokens) - self.prompt_length


class AnswerSet:
    def __init__(self, directory: Path) -> None:
        """Load the rounds that earlier runs have stored in `directory`."""
        self.directory = directory
        self.answers: list[Answer] = []
        self.rounds = 0
        while (file := self._file_of(self.rounds)).exists():
            self.answers += _read_answers(file)
            self.rounds += 1

    @property
    def answer_tokens(self) -> int:
        return sum(each.answer_length for each in self.answers)

    def add_round(self, answers: Sequence[Answer]) -> None:
        """Store the answers of one round. The file appears complete or not at all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        file = self._file_of(self.rounds)
        part = file.with_suffix(".part")
        with part.open("wb") as handle:
            np.savez(
                handle,
                tokens=np.concatenate([np.zeros(0, np.int32), *(each.tokens for each in answers)]),
                ends=np.cumsum([len(each.tokens) for each in answers], dtype=np.int64),
                prompt_lengths=np.array([each.prompt_length for each in answers], np.int32),
                temperatures=np.array([each.temperature for each in answers], np.float32),
            )
            handle.flush()
            os.fsync(handle.fileno())
        part.replace(file)
        self.answers += answers
        self.rounds += 1

    def split_held_out(self, min_answer: int) -> tuple[list[Answer], list[Answer]]:
        """Return the sequences for training and those for the report, without answers shorter than `min_answer`."""
        usable = [each for each in self.answers if each.answer_length >= min_answer]
        held_out = usable[::HELD_OUT_STRIDE][:MAX_HELD_OUT_SEQUENCES]
        ids = {id(each) for each in held_out}
        return [each for each in usable if id(each) not in ids], held_out

    def _file_of(self, number: int) -> Path:
        return self.directory / f"answers-{number:05}.npz"


def _read_answers(file: Path) -> list[Answer]:
    try:
        with np.load(file, allow_pickle=False) as stored:
            tokens, ends, prompt_lengths, temperatures = (stored[name] for name in ARRAY_NAMES)
    except (OSError, ValueError, KeyError, EOFError) as e:
        hint = "delete this file and all later rounds; they are generated again"
        raise ModelFileError(f"{file} is not a file of training answers: {e}", hint=hint) from e
    begins = [0, *ends.tolist()]
    return [
        Answer(tokens[begin:end], int(length), float(temperature))
        for begin, end, length, temperature in zip(begins, ends.tolist(), prompt_lengths, temperatures, strict=False)
    ]
