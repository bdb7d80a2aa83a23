"""Prompts for training data: from a file, made up by an instruct model, or none at all for a base model.

An instruct model has seen user messages in training. Given only the beginning of a user's turn, it makes one up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from emberline.core.errors import InvalidRequest, UnsupportedModel
from emberline.core.params import SamplingParams
from emberline.drafter.settings import MIN_MESSAGE_CHARS, TrainingSettings
from emberline.engine.llm import LLM

PLACEHOLDER = "\u2063placeholder\u2063"  # stands for the message when the chat template's parts are determined
SEEDS_PER_ROUND = 1 << 24  # distance between the seeds of two rounds


class PromptSource(Protocol):
    def next_round(self, number: int, used_prompts: set[tuple[int, ...]]) -> list[list[int]] | None:
        """Return the prompts of a generation round as token ids, except `used_prompts`; None after the last."""


@dataclass(frozen=True, slots=True)
class FilePrompts:
    llm: LLM
    settings: TrainingSettings
    path: Path
    lines: list[tuple[int, dict[str, Any]]]  # line numbers and their JSON objects

    def next_round(self, number: int, used_prompts: set[tuple[int, ...]]) -> list[list[int]] | None:
        first = number * self.settings.round_prompts
        lines = self.lines[first : first + self.settings.round_prompts]
        prompts = dict.fromkeys(tuple(self._encode(values, line)) for line, values in lines)
        wanted = [list(ids) for ids in prompts if len(ids) <= self.settings.max_prompt and ids not in used_prompts]
        return wanted if lines else None

    def _encode(self, values: dict[str, Any], line: int) -> list[int]:
        prompt, messages = values.get("prompt"), values.get("messages")
        if isinstance(prompt, str) and prompt:
            return self.llm.tokenizer.encode(prompt)
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise InvalidRequest(f"{self.path}, line {line}: must have a text prompt or a list messages")
        while messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]  # the model gives its own answer
        if self.llm.template is None:
            hint = "give prompts without messages"
            raise UnsupportedModel(f"{self.path}, line {line} has messages; the model has no chat template", hint=hint)
        return self.llm.tokenizer.encode(self.llm.template.render(messages), add_special=False)


@dataclass(frozen=True, slots=True)
class SyntheticPrompts:
    llm: LLM
    settings: TrainingSettings
    opening: list[int]  # the tokens before a user message

    @staticmethod
    def for_template(llm: LLM, settings: TrainingSettings) -> SyntheticPrompts:
        assert llm.template is not None
        text = llm.template.render([{"role": "user", "content": PLACEHOLDER}])
        opening, found, _ = text.partition(PLACEHOLDER)
        if not found:
            hint = "give prompts with --prompts FILE"
            raise UnsupportedModel("the chat template changes the text of user messages", hint=hint)
        return SyntheticPrompts(llm, settings, llm.tokenizer.encode(opening, add_special=False))

    def next_round(self, number: int, used_prompts: set[tuple[int, ...]]) -> list[list[int]]:
        assert self.llm.template is not None
        settings, first = self.settings, self.settings.seed + number * SEEDS_PER_ROUND
        length = max(1, settings.max_prompt - len(self.opening))
        params = [
            SamplingParams(max_tokens=length, temperature=1.0, seed=first + index)
            for index in range(settings.round_prompts)
        ]
        written = self.llm.generate([self.opening] * len(params), params)
        messages = [each.text.strip() for each in written if each.finish_reason == "stop"]  # others are incomplete
        rendered = [
            self.llm.template.render([{"role": "user", "content": text}])
            for text in dict.fromkeys(messages)
            if len(text) >= MIN_MESSAGE_CHARS
        ]
        prompts = self.llm.tokenizer.encode_batch(rendered, add_special=False) if rendered else []
        return [ids for ids in prompts if len(ids) <= settings.max_prompt and tuple(ids) not in used_prompts]


@dataclass(frozen=True, slots=True)
class EmptyPrompts:
    """Prompts of one token, with which a text begins: a base model then writes a text of its own."""

    settings: TrainingSettings
    first_token: int

    def next_round(self, number: int, used_prompts: set[tuple[int, ...]]) -> list[list[int]]:
        return [[self.first_token]] * self.settings.round_prompts


def choose_prompt_source(llm: LLM, settings: TrainingSettings, first_token: int) -> PromptSource:
    if settings.prompts is not None:
        path = Path(settings.prompts)
        return FilePrompts(llm, settings, path, list(_read_lines(path)))
    if llm.template is not None:
        return SyntheticPrompts.for_template(llm, settings)
    return EmptyPrompts(settings, first_token)


def _read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers and JSON objects of a JSON Lines file. Raise InvalidRequest for anything else."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    values = json.loads(line)
                    if not isinstance(values, dict):
                        raise ValueError("not an object")
                    yield number, values
    except OSError as e:
        raise InvalidRequest(f"cannot read the prompts in {path}: {e.strerror or e}", hint="check --prompts") from e
    except ValueError as e:
        raise InvalidRequest(f"{path}, line {number}: must be a JSON object: {e}", param="prompts") from e
