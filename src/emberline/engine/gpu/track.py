"""Track: a lane of the device with its own inputs, and the steps that were captured there."""

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
    """Where a step's inputs are on the device."""

    tokens: Tensor
    token_rows: Tensor
    slots: Tensor
    positions: Tensor
    context: Tensor
    rows: Tensor
    query_start: Tensor
    tiles: ops.Tiles
    logit_rows: Tensor | None  # None: all
    ahead: ops.Ahead  # its track's


@dataclass(frozen=True, slots=True)
class Captured:
    """A step of one shape, ready to be repeated: inputs at fixed addresses in, logits out."""

    logits: Tensor
    replay: Callable[[], None]


class Track:
    def __init__(self, lane: Lane, inputs: Staging, ahead: ops.Ahead, most_rows: int) -> None:
        """`most_rows`: of a captured step, padding included."""
        self.lane = lane
        self.most_rows = most_rows
        self.inputs = inputs
        self.ahead = ahead
        self.capture_failed = False
        self.captured: dict[Shape, Captured] = {}
        self._logits: Tensor | None = None

    def logits(self, rows: int, vocab: int, device: torch.device) -> Tensor:
        """Where captured steps leave theirs: one place for all, since each is read before the next begins."""
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
    """What the model does in a step."""

    inputs: Inputs
    logits: Tensor | None  # where they go; None: wherever
    replay: Callable[[], None] | None  # the same as captured; None: step by step
    count: int  # of the logits, how many are wanted
    wanted: Tensor | None  # which; None: the first
