"""DraftModel: a model that guesses the next tokens of a request, from its tokens or from the target model's states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.forward import ForwardBatch


class DraftModel(Protocol):
    """A model that drafts one token in each pass. The drafted token is the input of the next pass.

    The first pass reads the tokens of the target model's step. A model with `captured_layers` continues from hidden
    states of the target model: at position i it reads the target's states of position i and the token of position
    i + 1. Any other model reads the token of position i at position i."""

    @property
    def config(self) -> ModelConfig:
        """The config of the draft model, which determines the size of its KV cache."""
        ...

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers of the target model whose inputs the draft model reads; empty if it reads tokens only."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    def combine(self, captured: Tensor) -> Tensor:
        """Return the hidden states for the first pass, from those of the target model's `captured_layers`."""
        ...

    def forward(self, batch: ForwardBatch, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return for each of `batch.logit_rows` the likeliest next token, and hidden states for the next pass.

        `hidden`: the hidden states of all rows, which are overwritten; None if the model reads tokens only. The tokens
        are ids of the target model's vocabulary. Keys and values of all rows are written to the batch's cache."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderDraftModel:
    """A smaller model with the vocabulary of the target model."""

    model: DecoderModel
    target_vocab: int  # tokens that the target model knows; ids from there on are padding
    weight_bytes: int

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def captured_layers(self) -> tuple[int, ...]:
        return ()

    def combine(self, captured: Tensor) -> Tensor:
        raise NotImplementedError("this draft model reads no hidden states")

    def forward(self, batch: ForwardBatch, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.model.forward(batch)[:, : self.target_vocab].argmax(dim=-1), None
