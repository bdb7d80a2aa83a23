"""TrainingSettings: how a drafter is trained. This module does not import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from emberline.core.errors import InvalidRequest
from emberline.core.options import option

GREEDY_AND_SAMPLED = (0.0, 0.7, 0.0, 1.0)  # temperatures of consecutive answers
MIN_MESSAGE_CHARS = 8  # shorter made-up user messages are dropped


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    prompts: str | None = option(
        None,
        'JSON Lines file of prompts, each {"messages": [...]} or {"prompt": "..."}.',
        metavar="FILE",
        default_text="the model makes up user messages",
    )
    tokens: int = option(4_000_000, "Tokens of answers to generate for training.")
    max_prompt: int = option(256, "Maximum tokens of a prompt; longer ones are left out.")
    max_answer: int = option(512, "Maximum tokens of an answer.")
    draft_vocab: int = option(
        0, "Tokens that the drafter can draft, the most frequent ones.", default_text="a third of the vocabulary,"
        " but 16384 to 32000",
    )  # fmt: skip
    passes: int = option(5, "Passes of the head that are trained, each of which drafts one token more.")
    epochs: int = option(3, "Times that each answer is used.")
    max_steps: int = option(0, "Maximum training steps; 0: as many as --epochs needs.")
    batch_tokens: int = option(0, "Tokens of a training step.", default_text="8192 on a GPU, 1024 on a CPU")
    learning_rate: float = option(1e-3, "Highest learning rate, after the warm-up.")
    round_prompts: int = option(
        0, "Prompts answered between two saves of the data.", default_text="4096 on a GPU, 64 on a CPU"
    )
    seed: int = option(0, "Seed of prompts, answers, initial weights and the order of batches.")

    def __post_init__(self) -> None:
        minimum = dict.fromkeys(("tokens", "max_prompt", "max_answer", "passes", "epochs"), 1)
        minimum |= dict.fromkeys(("draft_vocab", "max_steps", "batch_tokens", "round_prompts", "seed"), 0)
        for name, low in (minimum | {"max_answer": self.passes + 2}).items():
            if (value := getattr(self, name)) < low:
                raise InvalidRequest(f"{name} is {value}; it must be at least {low}", param=name)
        if not 0 < self.learning_rate <= 1:
            message = f"learning_rate is {self.learning_rate}; it must be above 0 and at most 1"
            raise InvalidRequest(message, param="learning_rate")

    @staticmethod
    def resolve(
        explicit: dict[str, Any], stored: dict[str, Any] | None, defaults: dict[str, Any], out: str
    ) -> TrainingSettings:
        """Return the settings of a run.

        `explicit`: settings from the command line. `stored`: those of an earlier run in the same directory, which this
        run continues; raise InvalidRequest if one differs. `defaults`: the defaults of model and device."""
        explicit = {name: value for name, value in explicit.items() if value or name not in defaults}  # 0: the default
        if stored is None:
            return TrainingSettings(**(defaults | explicit))
        names = {each.name for each in fields(TrainingSettings)}
        settings = TrainingSettings(**{name: value for name, value in stored.items() if name in names})
        for name, value in explicit.items():
            if (used := getattr(settings, name)) != value:
                option_name = name.replace("_", "-")
                raise InvalidRequest(
                    f"{name} is {value}, but the training in {out} was started with {used}",
                    param=name,
                    hint=f"drop --{option_name} to continue that training, or choose another --out",
                )
        return settings

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def max_length(self) -> int:
        """Maximum tokens of a training sequence, prompt and answer together."""
        return self.max_prompt + self.max_answer
