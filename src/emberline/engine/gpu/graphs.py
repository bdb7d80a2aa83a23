"""StepGraphs: the captured CUDA graphs of steps, with their stream and the memory of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.core.engine_config import SchedulerConfig
from emberline.engine.gpu.data_parallel_rows import ExchangedRows
from emberline.engine.gpu.device import DeviceStream
from emberline.engine.gpu.shape import StepShape, max_step_rows
from emberline.engine.gpu.staging import InputStaging
from emberline.kernels import ops


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of the model for one step, on the device."""

    tokens: Tensor
    newest_index: Tensor
    shifts: tuple[Tensor, Tensor] | None  # of tokens and rows; see DeviceBatch. None: there is no draft model
    slots: Tensor
    positions: Tensor
    context: Tensor
    rows: Tensor
    query_start: Tensor
    tiles: ops.AttentionPlan
    logit_rows: Tensor | None  # tokens whose logits are computed; None: all
    weight_unpacker: ops.WeightUnpacker
    window_slots: Tensor | None  # slots in each group of layers with an attention window; None: there are none
    state_slots: Tensor | None = None  # StateRows.slots; None: there are no recurrent layers
    state_drafts: Tensor | None = None  # StateRows.drafts and query_start; None: no drafts in recurrent layers
    state_starts: Tensor | None = None
    has_drafts: bool = True  # whether a request may have drafted tokens
    exchanged: ExchangedRows | None = None  # with data-parallel attention


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step of one shape, captured as a CUDA graph. It reads inputs at fixed addresses and writes logits."""

    logits: Tensor
    replay: Callable[[], None]


class StepGraphs:
    def __init__(
        self, stream: DeviceStream, inputs: InputStaging, weight_unpacker: ops.WeightUnpacker, max_rows: int
    ) -> None:
        """`max_rows`: number of rows of the largest captured step, including padding."""
        self.stream = stream
        self.max_rows = max_rows
        self.inputs = inputs
        self.weight_unpacker = weight_unpacker
        self.capture_failed = False
        self.captured: dict[StepShape, CapturedStep] = {}
        self._logits: Tensor | None = None

    def get_logits_buffer(self, rows: int, vocab_size: int, device: torch.device) -> Tensor:
        """Return the first `rows` rows of the buffer that all captured steps write their logits to.

        The buffer is allocated by the first call. The next step overwrites it."""
        if self._logits is None:
            self._logits = torch.empty(self.max_rows, vocab_size, device=device)
        assert rows <= self.max_rows
        return self._logits[:rows]

    def drop_device_addresses(self) -> None:
        self.captured.clear()
        self.stream.release_captures()
        self.inputs.forget_views()
        self.weight_unpacker.release()
        self._logits = None


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A step that is ready to run: the inputs of the model and where its logits go. Sampling is separate."""

    inputs: StepInputs
    logits: Tensor | None  # where to write the logits; None: to a new tensor
    replay: Callable[[], None] | None  # replays the captured graph; None: run uncaptured
    count: int  # rows of logits that are used
    used_rows: Tensor | None  # indexes of these rows; None: the first `count`


def max_input_bytes(limits: SchedulerConfig, planner: ops.AttentionPlanner, num_tables: int = 1) -> int:
    """Return the size of the memory for the inputs of a step. `num_tables`: block tables of each request."""
    per_token, per_row = 8 + 8 + 8 + 8 + 4 + 8 * (num_tables - 1), 4 + 8 + 4 + 8 + 8 + 4 + 40 + 64
    tables = 16 * (limits.max_batch_tokens // limits.block_size + limits.max_running) * num_tables
    rows = max_step_rows(limits.max_running)
    tiles = planner.max_plan_bytes(rows, limits.max_batch_tokens)
    return 2 * (limits.max_batch_tokens * per_token + rows * per_row + tables + tiles) + (1 << 20)
