"""StepGraphs: a device stream with the staged inputs of its steps and their captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.engine.gpu.device import Lane
from emberline.engine.gpu.shape import Shape
from emberline.engine.gpu.staging import Staging
from emberline.kernels import ops


@dataclass(frozen=True, slots=True)
class Inputs:
    """The model's inputs of a step, on the device."""

    tokens: Tensor
    token_rows: Tensor
    slots: Tensor
    positions: Tensor
    context: Tensor
    rows: Tensor
    query_start: Tensor
    tiles: ops.Tiles
    logit_rows: Tensor | None  # tokens whose logits are computed; None: all
    ahead: ops.Ahead


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured step of one shape: it reads inputs at fixed addresses and writes logits."""

    logits: Tensor
    replay: Callable[[], None]


class Track:
    def __init__(self, lane: Lane, inputs: Staging, ahead: ops.Ahead, most_rows: int) -> None:
        """`max_rows`: of a captured step, including padding."""
        self.lane = lane
        self.most_rows = most_rows
        self.inputs = inputs
        self.ahead = ahead
        self.capture_failed = False
        self.captured: dict[Shape, Captured] = {}
        self._logits: Tensor | None = None

    def logits(self, rows: int, vocab: int, device: torch.device) -> Tensor:
        """Return the tensor that all captured steps write logits to; it is read before the next step."""
        if self._logits is None:
            self._logits = torch.empty(self.most_rows, vocab, device=device)
        assert rows <= self.most_rows
        return self._logits[:rows]

    def forget(self) -> None:
        self.captured.clear()
        self.lane.forget()
        self.inputs.forget()
        self.ahead.forget()
        self._logits = None


@dataclass(frozen=True, slots=True)
class Part:
    """The model's part of a step."""

    inputs: Inputs
    logits: Tensor | None  # where to write the logits; None: to a new tensor
    replay: Callable[[], None] | None  # replays the captured graph; None: run uncaptured
    count: int  # rows of logits that are used
    wanted: Tensor | None  # indexes of these rows; None: the first `count`
